#pragma once

#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// A device for machines without one: PrivateUse1, torch's place for devices of others. Code for the CPU that touches a
// tensor's memory is killed, no operation mixes its tensors with those of the CPU, and backward computes their
// gradients on a thread of its own, as it does for a GPU. Its streams are numbers; what they hold is done at once.

namespace lockstep::testing {

/// In a program that names this function there is the device.
c10::Device fake_device();

/// An engine for its tensors; `cpu` does the work.
c10::intrusive_ptr<c10d::Backend> make_fake_device_backend(c10::intrusive_ptr<c10d::Backend> cpu);

/// This thread's current stream; 0 at first.
void set_fake_stream(int stream);
/// (what was recorded, what waits for it), in the order in which streams were told to wait for others.
std::vector<std::pair<int, int>> take_fake_waits();

}  // namespace lockstep::testing
