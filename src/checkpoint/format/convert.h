#pragma once

#include <string>

namespace lockstep {

/// Writes what is in `from` to `to`, each a .pt (.pth) or .safetensors file by its name. Nested dictionaries become
/// names with dots; whatever is not a tensor becomes a string of the metadata in a .safetensors file, and a string
/// among the tensors in a .pt file. Atomic. Returns what a user should know about the result, one sentence a line;
/// usually "". Throws Error naming the file.
std::string convert_file(const std::string& from, const std::string& to);

}  // namespace lockstep
