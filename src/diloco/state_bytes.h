#pragma once

#include <string>
#include <string_view>

#include <lockstep/state_dict.h>

namespace lockstep::diloco {

/// A state as bytes for another machine. TORCH_CHECK fails for tensors that are not plain and on the CPU.
std::string bytes_of_state(const StateDict& state);
/// The reverse. It calls nothing that the bytes name: they are names, shapes and numbers. Throws Error, before it takes
/// more memory than `bytes` has, unless bytes_of_state() may have written them.
StateDict state_of_bytes(std::string_view bytes);

}  // namespace lockstep::diloco
