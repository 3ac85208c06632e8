#pragma once

#include <functional>
#include <memory>
#include <unordered_set>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

namespace lockstep {

using Leaves = std::unordered_set<const c10::TensorImpl*>;
/// `beside`: the leaves that a summand of what backward() was called on reaches without a followed result; null: none.
using FollowedResult = std::function<void(int backward, std::shared_ptr<const Leaves> beside)>;

/// Calls `passes` with current_backward() in every backward through the operation that made `result`, on the thread
/// that runs that part of it. Does nothing if no operation did.
void follow_result(const at::Tensor& result, FollowedResult passes);
/// Whether such a result is among the latest operations that `tensor` was computed with: 64 of them are looked at.
bool comes_from_followed_result(const at::Tensor& tensor);
/// A backward begins from these.
void tell_followed_results(const torch::autograd::edge_list& roots);

}  // namespace lockstep
