#pragma once

#include <functional>
#include <memory>
#include <unordered_set>

namespace lockstep {

/// Addresses of torch's TensorImpls, which do not change while a tensor belongs to a module.
using SetTensors = std::unordered_set<const void*>;

/// For holders of copies of weights before the ranks agree on them, such as averages made before
/// DistributedDataParallel sets all ranks to rank 0's weights. While the result lives, `listener` is called with the
/// tensors that were set, on the thread that set them. Any thread may call.
[[nodiscard]] std::shared_ptr<const void> on_broadcast(std::function<void(const SetTensors&)> listener);

/// Notifies the listeners that these weights were set to one rank's.
void notify_broadcast(const SetTensors& tensors);

}  // namespace lockstep
