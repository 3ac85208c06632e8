#pragma once

#include <string>

namespace lockstep {

/// Writes what is in `from` to `to`, each a .pt (.pth) or .safetensors file by its name. Nested dictionaries become
/// names with dots; what is no tensor becomes a text of the metadata in a .safetensors file, and a text among the
/// tensors in a .pt file. Atomic. Returns what a user should know of the result, one sentence a line; mostly "".
/// Throws Error naming the file.
std::string convert_file(const std::string& from, const std::string& to);

}  // namespace lockstep
