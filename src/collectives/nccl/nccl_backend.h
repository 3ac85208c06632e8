#pragma once

#include <chrono>

#include <string>

#include <c10/core/Device.h>
#include <c10/core/DeviceType.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::nccl_engine {

/// c10d's NCCL for tensors on `device`. Ranks connect at their first operation. Each rank needs its own GPU. Throws if
/// there is no engine for such devices: a build with NCCL has one for CUDA, a build without has none. Operations that
/// NCCL cannot reduce (int16; bitwise operations; complex numbers other than by sum and mean) throw when called.
///
/// A work's synchronize() orders the current stream after the operation. Its wait blocks until the device has done the
/// operation, at most `timeout`, and throws NCCL's errors on the waiting thread. While the current stream is captured
/// into a CUDA graph, it orders the stream after the operation and returns. Streams are ordered as in c10d: the
/// operation begins after the work queued on the current stream at the call. Destroy the backend only when the other
/// ranks have finished their operations, too. REQUIRES: every rank of the group calls it.
c10::intrusive_ptr<c10d::Backend> make_backend(c10::DeviceType device, const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int world_size, std::chrono::milliseconds timeout);

/// A name of the GPU, the same in every process that uses it, unless NCCL_HOSTID differs; empty for a device of another
/// type, and in a build without NCCL.
std::string gpu_name(c10::Device device);

}  // namespace lockstep::nccl_engine
