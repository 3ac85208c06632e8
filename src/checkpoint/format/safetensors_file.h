#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/byte_source.h"
#include "checkpoint/format/safetensors_header.h"

namespace lockstep {

/// A .safetensors file with a fully checked header: its tensors are consecutive and end at the end of the file, so
/// together they are never larger than the file.
class SafetensorsFile {
 public:
  /// Throws Error naming the file and the tensor. `source` outlives this.
  explicit SafetensorsFile(const ByteSource& source);

  /// In the order of the header.
  const std::vector<TensorEntry>& entries() const { return header_.entries; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  /// Entries and metadata, to be moved from.
  SafetensorsHeader& header() { return header_; }

  /// Copies the tensor's bytes to `to`. Throws Error for booleans other than 0 and 1.
  void read(const TensorEntry& entry, void* to) const;

 private:
  const ByteSource& source_;
  SafetensorsHeader header_;
};

/// The bytes before the tensors, which are stored consecutively in the order of `entries`: the length and the header.
/// Sets begin and end of each entry. Throws Error naming `path` for names that the format refuses.
std::string safetensors_header(std::vector<TensorEntry>& entries, const std::map<std::string, std::string>& metadata,
                               const std::string& path);

}  // namespace lockstep
