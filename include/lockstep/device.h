#pragma once

#include <lockstep/cxx20.h>

#include <c10/core/Device.h>

namespace lockstep {

/// This rank's device. With CUDA it is the device whose index is the local rank modulo the number of devices that this
/// process sees, so ranks share devices if there are fewer devices than ranks; otherwise it is the CPU. The local rank
/// is that of the process's Context or, before there is one, of the launcher's variables. Throws Error if it is not
/// known yet. Does not communicate.
[[nodiscard]] c10::Device device();

}  // namespace lockstep
