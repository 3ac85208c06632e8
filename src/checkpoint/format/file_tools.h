#pragma once

#include <functional>
#include <string>

namespace lockstep {

/// Converts `from` to `to`, each a .pt (.pth) or .safetensors file by its name. Nested dictionaries become names with
/// dots. Everything that is not a tensor becomes a string: in a .safetensors file in the metadata, in a .pt file among
/// the tensors. Atomic. Returns notes for the user about the result, one sentence per line; usually "". Throws Error
/// naming the file.
std::string convert_file(const std::string& from, const std::string& to);

/// Writes the contents of a .pt or .safetensors file as a table for people: name, dtype, shape and bytes of every
/// tensor, then the other values, then the totals. Reads no tensor data. Control characters in names are shown as \xNN.
/// Output comes in pieces, after the whole file has been checked: an Error, naming the file, is thrown before the first
/// piece.
void inspect_file(const std::string& path, const std::function<void(const std::string&)>& write);

}  // namespace lockstep
