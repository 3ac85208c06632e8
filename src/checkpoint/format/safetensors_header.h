#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/byte_source.h"
#include "checkpoint/format/tensor_entry.h"

namespace lockstep {

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  ///< in the order of the header
  std::map<std::string, std::string> metadata;
  uint64_t data = 0;  ///< the offset of the tensors
};

/// Reads the header in one pass, in time and memory that depend only on its length. Throws Error naming the file and
/// the tensor if it is not a header, or if the tensors are not consecutive up to the end of the file.
SafetensorsHeader read_safetensors_header(const ByteSource& source);

}  // namespace lockstep
