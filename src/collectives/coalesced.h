#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// Sets the tensors, of any dtypes, to rank `root`'s in few messages: they are packed as bytes, up to 25 MiB at once.
/// Every rank calls it with tensors of the same shapes and dtypes.
void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root);

/// broadcast_coalesced() of a model's weights. Holders of copies are notified (base/broadcast_notice.h).
void broadcast_weights(const Group& group, const std::vector<at::Tensor>& weights, int root);

/// Sets the tensors, floating point or complex, to their mean over the ranks weighted by `share`, in few messages. The
/// ranks' shares sum to 1; a rank whose share is 0 does not count, whatever its tensors hold. Half precision is summed
/// in fp32.
/// Every rank calls it with tensors of the same shapes and dtypes.
void average_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, double share);

}  // namespace lockstep
