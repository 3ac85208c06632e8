#pragma once

#include <string>

namespace lockstep {

/// Converts `from` to `to`, each a .pt (.pth) or .safetensors file by its name. Nested dictionaries become names with
/// dots. Everything that is not a tensor becomes a string: in a .safetensors file in the metadata, in a .pt file among
/// the tensors. Atomic. Returns notes for the user about the result, one sentence per line; usually "". Throws Error
/// naming the file.
std::string convert_file(const std::string& from, const std::string& to);

}  // namespace lockstep
