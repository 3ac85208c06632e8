#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// Sets the tensors, of any dtypes, to rank `root`'s in few messages: they are packed as bytes, up to 25 MiB at once.
/// Every rank calls it with tensors of the same shapes and dtypes.
void broadcast_coalesced(const Group& group, const std::vector<at::Tensor>& tensors, int root);

}  // namespace lockstep
