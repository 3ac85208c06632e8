#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/format/byte_source.h"
#include "checkpoint/format/tensor_entry.h"

namespace lockstep {

/// The content of the header of a .safetensors file.
struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  ///< in the order of the header
  std::map<std::string, std::string> metadata;
  uint64_t data = 0;  ///< where the tensors start
};

/// Reads it in one pass, in time and memory that depend on its length alone, whatever it says. Throws Error naming the
/// file and the tensor if it is not a header, or if the tensors do not lie one after the other up to the file's end.
SafetensorsHeader read_safetensors_header(const ByteSource& source);

}  // namespace lockstep
