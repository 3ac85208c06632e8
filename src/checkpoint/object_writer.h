#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include "base/atomic_file.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/zip_writer.h"
#include "checkpoint/memory/image_slices.h"
#include "checkpoint/slice_stream.h"

namespace lockstep {

/// An object ready to be written as a .pt file: its pickle, and each storage of its tensors once.
class ObjectWriter {
 public:
  /// Refers to the tensors in place: they must not change until write() is done. TORCH_CHECK fails for values that
  /// cannot be saved, naming their place in the object.
  explicit ObjectWriter(const c10::IValue& object);

  /// The storages of which each rank has a slice (sliced_memory.h), in the order of writing.
  std::vector<c10::Storage> sliced() const;
  /// Where they begin in the output of write() with this name and these checksums, and how they are divided.
  ImageSlices places_of_sliced(const std::string& name, ZipWriter::Checksums checksums) const;
  /// Called on rank 0, once: the missing slices come from the other ranks when the object is written, copied or
  /// destroyed. The others call send_slices() with the result of sliced() there. Without this call, such memory is
  /// written as it is here.
  void bring_slices_from(const Group& group);

  /// Copies all tensors, so that the originals may change. Reuses the memory of `old`, an earlier writer, if it fits.
  void detach_from_tensors(ObjectWriter* old);

  /// `name` is the folder inside the archive.
  void write(ByteSink& sink, const std::string& name,
             ZipWriter::Checksums checksums = ZipWriter::Checksums::kAll) const;
  uint64_t bytes() const;
  /// An upper bound of the output of write(), for any `name` of at most 16 characters.
  uint64_t most_bytes() const { return bytes() + pickle_.size() + (storages_.size() + 10) * 512; }
  /// Everything except tensor data.
  const std::string& pickle() const { return pickle_; }
  /// A hash of a few elements of every tensor without gaps on the CPU that lies in no slices. Another `turn` samples
  /// other elements.
  uint64_t hash_of_samples(uint64_t turn) const;

 private:
  struct Place;
  void add(const c10::IValue& value, const Place& place);
  void add_dict(const c10::IValue& value, const Place& place);
  void add_tensor(const at::Tensor& tensor, const Place& place);
  size_t storage_of(const at::Tensor& tensor);
  /// The division into slices of a storage to be completed; null if it is complete here.
  const Slices* slices(size_t storage) const;

  PickleWriter pickle_writer_;
  std::string pickle_;
  std::unordered_map<const void*, size_t> places_;  ///< of storages
  std::vector<c10::Storage> storages_;              ///< their bytes, on the CPU
  std::vector<c10::Storage> kept_;                  ///< keeps addresses unique
  struct Bytes {
    const std::byte* data;
    uint64_t count;
  };
  std::vector<Bytes> dense_;             ///< the tensors without gaps
  std::unique_ptr<SliceStream> others_;  ///< brings slices; null if none are missing
};

}  // namespace lockstep
