#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/byte_source.h"
#include "checkpoint/format/dtype.h"

namespace lockstep {

struct SafetensorsEntry {
  std::string name;
  const Dtype* dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  ///< of its bytes, behind the header

  uint64_t bytes() const { return end - begin; }
};

/// The header of a .safetensors file, checked piece by piece: its tensors lie one behind the other and end where the
/// file ends, so that all of them together are never larger than the file.
class SafetensorsFile {
 public:
  /// Throws Error naming the file and the tensor. `source` outlives this.
  explicit SafetensorsFile(const ByteSource& source);

  /// In the order of the header.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Copies the tensor's bytes to `to`. Throws Error for truth values other than 0 and 1.
  void read(const SafetensorsEntry& entry, void* to) const;

 private:
  class HeaderReader;
  const ByteSource& source_;
  uint64_t data_ = 0;  ///< where the tensors start
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// What stands before the tensors: the length and the header, for tensors that follow one behind the other in the
/// order of `entries`, whose begin and end are set. Throws Error naming `path` for names that the format refuses.
std::string safetensors_header(std::vector<SafetensorsEntry>& entries,
                               const std::map<std::string, std::string>& metadata, const std::string& path);

}  // namespace lockstep
