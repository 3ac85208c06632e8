#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include "base/byte_sink.h"
#include "checkpoint/format/pickle_writer.h"

namespace lockstep {

/// An object that is ready to be written as a .pt file: its pickle, and the storages of its tensors, each once.
class ObjectWriter {
 public:
  /// Refers to the tensors in place: they must not change until write() is done. TORCH_CHECK fails for whatever
  /// cannot be saved, naming where in the object it is.
  explicit ObjectWriter(const c10::IValue& object);

  /// Copies all tensors, so that they may change again. Reuses the memory of `old`, an earlier one, as far as it fits.
  void detach_from_tensors(ObjectWriter* old);

  /// `name` is the folder inside the archive.
  void write(ByteSink& sink, const std::string& name) const;
  uint64_t bytes() const;

 private:
  void add(const c10::IValue& value, const std::string& place, int depth);
  void add_dict(const c10::IValue& value, const std::string& place, int depth);
  void add_tensor(const at::Tensor& tensor, const std::string& place);
  size_t storage_of(const at::Tensor& tensor);

  PickleWriter pickle_writer_;
  std::string pickle_;
  std::unordered_map<const void*, size_t> places_;  ///< of storages
  std::vector<at::Tensor> storages_;                ///< their bytes, on the CPU
  std::vector<c10::Storage> kept_;                  ///< so that no two have the same address
};

}  // namespace lockstep
