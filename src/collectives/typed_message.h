#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <lockstep/error.h>

// Messages over engines that move bytes and compare nothing. An envelope of fixed size precedes the bytes. It holds
// their dtype and number, and the last few bytes; the rest follows in parts whose sizes are powers of two, one for each
// bit of the number. All are posted at once, so the envelope costs no extra round trip. Gloo ends a process that
// receives more bytes than it expects; over Gloo, parts of each size have their own tag, so that none is received as
// one of another size.

namespace lockstep {

/// Starts to send or receive contiguous bytes, to or from one rank with one tag; messages of one `part` arrive in
/// order. `part`: 0 for an envelope; otherwise there are 2^part bytes.
using PostBytes = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& bytes, int part)>;

struct MessageName {
  int from, to, tag;
};

/// A message has another dtype or size than its receiver expects.
struct WrongMessage : Error {
  using Error::Error;
};

/// `dense` is contiguous and on the CPU.
c10::intrusive_ptr<c10d::Work> send_typed(const at::Tensor& dense, const PostBytes& post);
/// The Work fails with a WrongMessage that names both sides.
c10::intrusive_ptr<c10d::Work> receive_typed(const at::Tensor& dense, MessageName name, const PostBytes& post);

}  // namespace lockstep
