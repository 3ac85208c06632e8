#pragma once

#include <ATen/core/Tensor.h>

#include "collectives/group_state.h"

// CPU tensors go to the group's own engine. Tensors on a device go to another engine, made at the first such tensor.

namespace lockstep {

/// Sends the call to the other ranks, and keeps its number in `device_call`; in a group of one, and for an operation
/// that sends nothing, does nothing.
void announce_device_call(Group::State& group, const shm::Call& call);

/// Makes the group's engine for devices of the tensor's type. If one rank cannot make it, every rank throws the same
/// Error.
/// REQUIRES: every rank of the group calls it in the same operation.
void make_device_engine(const Group& group, const at::Tensor& tensor);

/// The engine for an operation on memory on the tensor's device, which this rank starts now. Operations on a device are
/// announced to the other ranks. Where the engine for the CPU compares calls before anything is moved, as shared memory
/// does within microseconds, so are these: throws, on every rank, if a rank's call differs or a rank is gone. With
/// other engines check_device_call() throws it.
inline c10d::Backend& engine_for(const Group& group, const shm::Call& call, const at::Tensor& tensor) {
  Group::State& state = state_of(group);
  if (tensor.is_cpu()) return *state.backend;
  if (!state.device_backend) make_device_engine(group, tensor);
  announce_device_call(state, call);
  return *state.device_backend;
}

/// The engine for an operation on two tensors, which must be on one device.
inline c10d::Backend& engine_for(const Group& group, const shm::Call& call, const at::Tensor& input,
                                 const at::Tensor& output) {
  TORCH_CHECK(input.device() == output.device(), "the input is on ", input.device(), ", the output is on ",
              output.device(), "; move one of them");
  return engine_for(group, call, input);
}

/// Waits until every rank has announced the call. Throws, on every rank, if one differs or a rank is gone. The group's
/// device engine has then been aborted, so that nothing waits for the device.
void check_device_call(Group::State& group, uint64_t number);

/// A side of an all_to_all.
struct DeviceSplits {
  const at::Tensor& tensor;
  const std::vector<int64_t>& splits;  ///< rows for each rank; empty: as many for each
};
/// Compares what each rank sends to each in an all_to_all of tensors on a device with what that one expects, before
/// anything is sent. Throws the same Error on all ranks.
/// REQUIRES: every rank calls it in the same operation, after engine_for().
void compare_device_splits(Group::State& group, const DeviceSplits& sent, const DeviceSplits& received);

/// Ends what waits on the device for other ranks, when the group has failed.
void abort_device_engine(Group::State& group);

/// Releases the device engines of a group and its subgroups.
/// REQUIRES: the other ranks have finished their operations.
void release_device_engines(const Group& group);

}  // namespace lockstep
