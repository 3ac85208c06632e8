#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace lockstep::testing {

/// An engine for tensors on a device whose ranks may share one device: `cpu` works on copies on the CPU. Results are on
/// the device when the work has been waited for.
c10::intrusive_ptr<c10d::Backend> make_staged_backend(c10::intrusive_ptr<c10d::Backend> cpu);

}  // namespace lockstep::testing
