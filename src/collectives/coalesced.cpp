#include "collectives/coalesced.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/operand.h"

namespace lockstep {
namespace {

constexpr int64_t kMessageBytes = 25 << 20;

using Tensors = std::vector<at::Tensor>;

void broadcast_message(const Group& group, const Tensors& tensors, int root) {
  Tensors pieces;
  for (const auto& tensor : tensors) pieces.push_back(as_bytes(tensor.contiguous()));
  const at::Tensor message = at::cat(pieces);
  group.broadcast(message, root);
  if (group.rank() == root) return;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    const auto bytes = static_cast<int64_t>(tensor.nbytes());
    // clone: a view of another dtype needs its start aligned, which a piece of the message is not
    tensor.copy_(message.narrow(0, offset, bytes).clone().view(tensor.scalar_type()).view(tensor.sizes()));
    offset += bytes;
  }
}

}  // namespace

void broadcast_coalesced(const Group& group, const Tensors& tensors, int root) {
  at::NoGradGuard no_grad;
  Tensors message;
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (!message.empty() && (bytes + static_cast<int64_t>(tensor.nbytes()) > kMessageBytes ||
                             tensor.device() != message.front().device())) {
      broadcast_message(group, message, root);
      message.clear();
      bytes = 0;
    }
    message.push_back(tensor.detach());
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  if (!message.empty()) broadcast_message(group, message, root);
}

}  // namespace lockstep
