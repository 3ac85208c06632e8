#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

// A device for machines without one: PrivateUse1, torch's slot for out-of-tree devices. CPU code that touches a
// tensor's memory is killed, no operation mixes its tensors with those of the CPU, and backward computes their
// gradients on a separate thread, as it does for a GPU. Its streams are numbers; their work is done at once.

namespace lockstep::testing {

/// A program that names this function has the device.
c10::Device fake_device();

/// An engine for its tensors; `cpu` does the work.
c10::intrusive_ptr<c10d::Backend> make_fake_device_backend(c10::intrusive_ptr<c10d::Backend> cpu);

/// Bytes of all ranks' parts together in what this process has asked such engines for.
struct FakeTraffic {
  int64_t all_reduced = 0, reduce_scattered = 0, all_gathered = 0;
};
/// Since the last call.
FakeTraffic take_fake_traffic();

/// How often the host waited for the device since the last call: for a work, for a number, or in a copy from or to the
/// CPU.
int take_host_waits();

/// This thread's current stream; 0 at first.
void set_fake_stream(int stream);
/// (what was recorded, what waits for it), in the order in which streams were told to wait for others.
std::vector<std::pair<int, int>> take_fake_waits();

}  // namespace lockstep::testing
