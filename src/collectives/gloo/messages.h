#pragma once

#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace lockstep::gloo_engine {

/// Starts to send or to receive bytes. Messages of one stage between two ranks arrive in the order of the calls.
enum class Stage { kOperands, kResults };
using Post = std::function<c10::intrusive_ptr<c10d::Work>(const at::Tensor& bytes, int peer, Stage stage)>;

/// What the ranks of one collective send each other.
struct Messages {
  Post send, receive;
};

}  // namespace lockstep::gloo_engine
