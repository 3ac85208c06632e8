#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

namespace lockstep {

/// WayToResult::nonlinear: checkpoint() was given what was computed from the result.
inline constexpr const char* kCheckpointed = "checkpoint()";

using Leaves = std::unordered_set<const c10::TensorImpl*>;
/// What lies between a followed result and what backward() was called on.
struct WayToResult {
  std::shared_ptr<const Leaves> beside;  ///< what a summand reaches without a followed result; null: nothing
  std::string nonlinear;  ///< an operation whose gradient is no multiple of the result's; empty: none is known
};
using FollowedResult = std::function<void(int backward, const WayToResult& way)>;

/// Calls `passes` with current_backward() in every backward through the operation that made `result`, on the thread
/// that runs that part of it. Does nothing if no operation did.
void follow_result(const at::Tensor& result, FollowedResult passes);
/// Whether such a result is among the operations that `tensor` was computed with.
bool comes_from_followed_result(const at::Tensor& tensor);
/// A backward begins from these.
void tell_followed_results(const torch::autograd::edge_list& roots);

}  // namespace lockstep
