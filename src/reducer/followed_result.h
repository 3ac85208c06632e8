#pragma once

#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

namespace lockstep {

/// WayToResult::nonlinear: checkpoint() was given an input computed from the result.
inline constexpr const char* kCheckpointed = "checkpoint()";

using Leaves = std::unordered_set<const c10::TensorImpl*>;
/// The way from a followed result to the tensor on which backward() was called.
struct WayToResult {
  std::shared_ptr<const Leaves> beside;  ///< leaves that a summand reaches without a followed result; null: none
  std::string nonlinear;  ///< an operation whose gradient is not a multiple of the result's; empty: none known
};
using FollowedResult = std::function<void(int backward, const WayToResult& way)>;

/// Calls `passes` with current_backward() in every backward through the operation that made `result`, on the thread
/// that runs that part of it. Does nothing if no operation made it.
void follow_result(const at::Tensor& result, FollowedResult passes);
/// Whether a followed result is among the inputs of the operations that computed `tensor`.
bool comes_from_followed_result(const at::Tensor& tensor);
/// Tells followed results that a backward begins from these.
void tell_followed_results(const std::vector<torch::autograd::Edge>& roots);

}  // namespace lockstep
