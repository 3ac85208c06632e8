#pragma once

#include <functional>
#include <memory>
#include <unordered_set>

namespace lockstep {

/// Addresses of torch's TensorImpls, which stay the same for as long as a tensor is a module's.
using SetTensors = std::unordered_set<const void*>;

/// For who holds copies of weights that the ranks have yet to agree on, such as averages that are made before
/// DistributedDataParallel sets all ranks to rank 0's. `follow` is called with the tensors that were set, on the thread
/// that set them, as long as the result lives. Any thread.
[[nodiscard]] std::shared_ptr<const void> on_broadcast(std::function<void(const SetTensors&)> follow);

/// Weights were set to one rank's.
void notice_broadcast(const SetTensors& tensors);

}  // namespace lockstep
