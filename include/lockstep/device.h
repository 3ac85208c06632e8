#pragma once

#include <c10/core/Device.h>

namespace lockstep {

/// The device of this rank: with CUDA the one whose index is the local rank (modulo the devices this process sees, so
/// that ranks share where there are fewer), else the CPU. The local rank is that of the process's Context; before there
/// is one, what the launcher says. Throws Error if it is not known yet. Does not communicate.
[[nodiscard]] c10::Device device();

}  // namespace lockstep
