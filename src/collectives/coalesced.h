#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// Copies rank `root`'s tensors, of any dtypes, to all ranks in few messages: they are packed as bytes, up to 25 MiB at
/// a time.
/// REQUIRES: every rank calls it with tensors of the same shapes and dtypes.
void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root);

/// broadcast_coalesced() of a model's weights. Holders of copies are notified (base/broadcast_notice.h).
void broadcast_weights(const Group& group, const std::vector<at::Tensor>& weights, int root);

/// Replaces the tensors, floating point or complex, by their mean over the ranks weighted by `share`, in few messages.
/// The ranks' shares sum to 1. A rank whose share is 0 does not count, whatever its tensors hold. Half precision is
/// summed in fp32.
/// REQUIRES: every rank calls it with tensors of the same shapes and dtypes.
void average_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, double share);

}  // namespace lockstep
