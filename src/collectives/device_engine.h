#pragma once

#include <ATen/core/Tensor.h>

#include "collectives/group_state.h"

// Tensors on the CPU go to the group's own engine, those on a device to another, made when the first one comes.

namespace lockstep {

/// Makes the group's engine for devices of the tensor's type. Every rank of the group calls it in the same operation;
/// if one of them cannot make it, every rank throws the same Error.
void make_device_engine(const Group& group, const at::Tensor& tensor);

/// The engine that works on memory where the tensor lies.
inline c10d::Backend& engine_for(const Group& group, const at::Tensor& tensor) {
  Group::State& state = state_of(group);
  if (tensor.is_cpu()) return *state.backend;
  if (!state.device_backend) make_device_engine(group, tensor);
  return *state.device_backend;
}

/// The same for an operation on two tensors, which must be on one device.
inline c10d::Backend& engine_for(const Group& group, const at::Tensor& input, const at::Tensor& output) {
  TORCH_CHECK(input.device() == output.device(), "the input is on ", input.device(), ", the output on ",
              output.device(), "; move one of them");
  return engine_for(group, input);
}

/// Lets go of the engines for devices of a group and its subgroups, when the other ranks have done their operations.
void release_device_engines(const Group& group);

}  // namespace lockstep
