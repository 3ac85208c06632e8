#pragma once

#include <functional>
#include <string>

namespace lockstep {

/// Writes the contents of a .pt or .safetensors file as a table for people: name, dtype, shape and bytes of every
/// tensor, then the other values, then the totals. Reads no tensor data. Control characters in names are shown as \xNN.
/// Output comes in pieces, after the whole file has been checked: an Error, naming the file, is thrown before the first
/// piece.
void inspect_file(const std::string& path, const std::function<void(const std::string&)>& write);

}  // namespace lockstep
