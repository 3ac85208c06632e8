#pragma once

#include <string>

namespace lockstep {

/// What a .pt or .safetensors file holds, as a table for people: name, dtype, shape and bytes of every tensor, then the
/// other values, then the sums. Reads no tensor's bytes. Control characters of names are shown as \xNN.
/// Throws Error naming the file.
std::string inspect_file(const std::string& path);

}  // namespace lockstep
