#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

// Messages over engines that move bytes and compare nothing. In front of the bytes, with the same tag, goes an envelope
// that says their dtype and size. Both are posted at once, so that the envelope costs no turn of its own.

namespace lockstep {

/// Starts to send or to receive contiguous bytes, to or from one rank with one tag; such messages arrive in order.
using PostBytes = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& bytes)>;

struct MessageName {
  int from, to, tag;
};

/// `dense` is contiguous and on the CPU.
c10::intrusive_ptr<c10d::Work> send_typed(const at::Tensor& dense, const PostBytes& post);
/// The Work fails with an Error that names both sides if the message is of another dtype or size.
c10::intrusive_ptr<c10d::Work> receive_typed(const at::Tensor& dense, MessageName name, const PostBytes& post);

}  // namespace lockstep
