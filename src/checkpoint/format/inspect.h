#pragma once

#include <functional>
#include <string>

namespace lockstep {

/// What a .pt or .safetensors file holds, as a table for people: name, dtype, shape and bytes of every tensor, then the
/// other values, then the sums. Reads no tensor's bytes. Control characters of names are shown as \xNN.
/// Written piece by piece once the whole file has been checked: any Error naming the file is thrown before the first.
void inspect_file(const std::string& path, const std::function<void(const std::string&)>& write);

}  // namespace lockstep
