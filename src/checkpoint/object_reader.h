#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>

#include "checkpoint/format/pt_file.h"

namespace lockstep {

/// Makes tensors and objects from a .pt file. Throws Error naming the file and the place in the object.
class ObjectReader {
 public:
  static constexpr int kMaxDepth = 128;  ///< of nested containers; deeper ones are refused

  /// With `mapped`, which must be `source`, tensors lie in a private mapping of the file.
  explicit ObjectReader(const ByteSource& source, const FileSource* mapped = nullptr);

  const PtFile& file() const { return file_; }
  /// Takes these bytes for a storage, which is then not read.
  void set_storage(size_t storage, at::Tensor bytes) { storages_[storage] = std::move(bytes); }
  at::Tensor tensor(const PickledTensor& tensor, const std::string& place);
  /// The whole file.
  c10::IValue object();

 private:
  c10::IValue object(NodeId id, const std::string& place, int depth);
  c10::IValue dict(NodeId id, const std::string& place, int depth);
  c10::IValue key(NodeId id, const std::string& place) const;
  at::Tensor storage(uint32_t index, const std::string& place);
  at::Tensor read_storage(uint32_t index) const;
  [[noreturn]] void refuse(const std::string& place, const std::string& what) const;

  const ByteSource& source_;
  PtFile file_;
  std::shared_ptr<char> mapping_;        ///< null if the file is read
  std::vector<at::Tensor> storages_;     ///< their bytes; undefined until needed
  std::vector<char> truth_checked_;      ///< by storage: known to hold only 0 and 1
  std::vector<c10::IValue> containers_;  ///< by node: the container, once made
  std::vector<char> state_;              ///< by node: 0 new, 1 being made, 2 made
};

}  // namespace lockstep
