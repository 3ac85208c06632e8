#pragma once

#include <c10/core/Device.h>

namespace lockstep {

/// Called by the Context, for device().
void remember_local_rank(int local_rank);

/// The rule of device(). `cuda_devices` is the number that this process sees.
at::Device device_of(int local_rank, int cuda_devices);

}  // namespace lockstep
