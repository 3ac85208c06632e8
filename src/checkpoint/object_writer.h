#pragma once

#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include "base/byte_sink.h"
#include "checkpoint/format/pickle_writer.h"
#include "checkpoint/format/zip_writer.h"
#include "checkpoint/slice_stream.h"

namespace lockstep {

/// An object that is ready to be written as a .pt file: its pickle, and the storages of its tensors, each once.
class ObjectWriter {
 public:
  /// Refers to the tensors in place: they must not change until write() is done. TORCH_CHECK fails for whatever
  /// cannot be saved, naming where in the object it is.
  explicit ObjectWriter(const c10::IValue& object);

  /// The memory in it of which each rank has a slice (sliced_memory.h), in the order in which it is written.
  std::vector<c10::Storage> sliced() const;
  /// On rank 0, once: what it lacks of such memory comes from the others when it is written or copied, or when this
  /// object goes. They call send_slices() with what sliced() gives there. Else it is taken as it lies here.
  void bring_slices_from(const Group& group);

  /// Copies all tensors, so that they may change again. Reuses the memory of `old`, an earlier one, as far as it fits.
  void detach_from_tensors(ObjectWriter* old);

  /// `name` is the folder inside the archive.
  void write(ByteSink& sink, const std::string& name,
             ZipWriter::Checksums checksums = ZipWriter::Checksums::kAll) const;
  uint64_t bytes() const;
  /// write() writes no more than this, whatever `name` of at most 16 characters.
  uint64_t most_bytes() const { return bytes() + pickle_.size() + (storages_.size() + 10) * 512; }
  /// Everything but the bytes of the tensors.
  const std::string& pickle() const { return pickle_; }
  /// A hash of a few elements of every tensor whose memory on the CPU has no gaps: of others for another `turn`.
  uint64_t hash_of_samples(uint64_t turn) const;

 private:
  struct Place;
  void add(const c10::IValue& value, const Place& place);
  void add_dict(const c10::IValue& value, const Place& place);
  void add_tensor(const at::Tensor& tensor, const Place& place);
  size_t storage_of(const at::Tensor& tensor);
  /// How a storage lies in slices that are to be brought; null: it lies here.
  const Slices* slices(size_t storage) const;

  PickleWriter pickle_writer_;
  std::string pickle_;
  std::unordered_map<const void*, size_t> places_;  ///< of storages
  std::vector<c10::Storage> storages_;              ///< their bytes, on the CPU
  std::vector<c10::Storage> kept_;                  ///< so that no two have the same address
  struct Bytes {
    const std::byte* data;
    uint64_t count;
  };
  std::vector<Bytes> dense_;                        ///< where those tensors lie that have no gaps
  std::unique_ptr<SliceStream> others_;             ///< brings slices; null: nothing is to be brought
};

}  // namespace lockstep
