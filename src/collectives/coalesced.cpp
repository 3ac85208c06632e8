#include "collectives/coalesced.h"

#include <functional>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/broadcast_notice.h"
#include "collectives/operand.h"
#include "collectives/work.h"

namespace lockstep {
namespace {

constexpr int64_t kMessageBytes = 25 << 20;
/// Tensors of at least this size are sent alone: packing them would cost more than a message.
constexpr int64_t kAloneBytes = 1 << 20;

using Tensors = std::vector<at::Tensor>;

/// Calls `send` with messages of bounded size, made of neighbouring tensors that `together` allows in one message.
void in_messages(const Tensors& tensors, const std::function<bool(const at::Tensor&, const at::Tensor&)>& together,
                 const std::function<void(const Tensors&)>& send) {
  Tensors message;
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    if (bytes_of(tensor) >= kAloneBytes) {
      send({tensor.detach()});
      continue;
    }
    if (!message.empty() && (bytes + bytes_of(tensor) > kMessageBytes || !together(tensor, message.front()))) {
      send(message);
      message.clear();
      bytes = 0;
    }
    message.push_back(tensor.detach());
    bytes += bytes_of(tensor);
  }
  if (!message.empty()) send(message);
}

/// On a device, the host does not wait: what reads the tensors is queued behind the operation.
void broadcast(const Group& group, const at::Tensor& tensor, int root) {
  tensor.is_cpu() ? group.broadcast(tensor, root) : order_after(group.broadcast_async(tensor, root));
}

void broadcast_message(const Group& group, const Tensors& tensors, int root) {
  // A large tensor needs no copy. Buffers with unchanged values may be saved for a backward, so they get no new
  // version.
  if (tensors.size() == 1) return broadcast(group, tensors.front().variable_data(), root);
  Tensors pieces;
  for (const auto& tensor : tensors) pieces.push_back(as_bytes(tensor.contiguous()));
  const at::Tensor message = at::cat(pieces);
  broadcast(group, message, root);
  if (group.rank() == root) return;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    // A view of another dtype needs an aligned start, which a piece of the message may not have: hence clone().
    tensor.copy_(message.narrow(0, offset, bytes_of(tensor)).clone().view(tensor.scalar_type()).view(tensor.sizes()));
    offset += bytes_of(tensor);
  }
}

at::ScalarType sum_dtype(at::ScalarType dtype) { return at::isReducedFloatingType(dtype) ? at::kFloat : dtype; }

void average_message(const Group& group, const Tensors& tensors, double share) {
  Tensors pieces;
  for (const auto& tensor : tensors) pieces.push_back(tensor.reshape({-1}).to(sum_dtype(tensor.scalar_type())));
  const at::Tensor message = at::cat(pieces);
  share == 0 ? message.zero_() : message.mul_(share);
  message.is_cpu() ? group.all_reduce(message) : order_after(group.all_reduce_async(message));
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    tensor.copy_(message.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

}  // namespace

void broadcast_coalesced(const Group& group, const Tensors& tensors, int root) {
  at::NoGradGuard no_grad;
  in_messages(
      tensors, [](const auto& a, const auto& b) { return a.device() == b.device(); },
      [&](const Tensors& message) { broadcast_message(group, message, root); });
}

void broadcast_weights(const Group& group, const Tensors& weights, int root) {
  broadcast_coalesced(group, weights, root);
  SetTensors set;
  for (const at::Tensor& tensor : weights) set.insert(tensor.unsafeGetTensorImpl());
  notify_broadcast(set);
}

void average_coalesced(const Group& group, const Tensors& tensors, double share) {
  at::NoGradGuard no_grad;
  in_messages(
      tensors,
      [](const auto& a, const auto& b) {
        return a.device() == b.device() && sum_dtype(a.scalar_type()) == sum_dtype(b.scalar_type());
      },
      [&](const Tensors& message) { average_message(group, message, share); });
}

}  // namespace lockstep
