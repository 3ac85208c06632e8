#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "checkpoint/format/byte_source.h"
#include "checkpoint/format/pt_file.h"
#include "checkpoint/format/safetensors_file.h"
#include "checkpoint/format/tensor_entry.h"

namespace lockstep {

/// A .pt or .safetensors file as a flat list. Names are keys joined by dots, and everything that is not a tensor is a
/// string.
class Contents {
 public:
  /// How to treat two entries whose dotted keys are equal: throw Error, or number the later ones, "a.b (2)", for people
  /// to read.
  enum class Repeated { kRefused, kNumbered };
  /// Throws Error naming the file.
  explicit Contents(const std::string& path, Repeated repeated = Repeated::kRefused);

  bool is_pt() const { return pt_ != nullptr; }
  const std::vector<TensorEntry>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& texts() const { return texts_; }
  /// The storages of the tensors, each counted once, and their bytes.
  struct Storages {
    size_t count = 0;
    uint64_t bytes = 0;
  };
  Storages storages() const;
  /// Reads the tensor's bytes in pieces, in order and without gaps.
  void read(size_t tensor, const std::function<void(const char*, uint64_t)>& take) const;

 private:
  void list_pt(Repeated repeated);
  void list_safetensors();

  const FileSource source_;
  std::unique_ptr<PtFile> pt_;
  std::unique_ptr<SafetensorsFile> safetensors_;
  std::vector<TensorEntry> tensors_;
  std::vector<const PickledTensor*> pickled_;  ///< of a .pt file
  std::map<std::string, std::string> texts_;
  mutable std::string memory_;  ///< the last storage read
  mutable size_t in_memory_ = static_cast<size_t>(-1);
};

/// A number, boolean or string of a .pt file as a string; all but strings as JSON.
std::string text_of(const PickleTree& tree, const Node& node);

/// Whether to read the file as .pt: it is a zip archive, or is named like one.
bool is_pt_file(const FileSource& source);

}  // namespace lockstep
