#pragma once

#include <atomic>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/non_finite_policy.h>

namespace lockstep {

/// Finds gradients with infinity or NaN before they are combined with other ranks', so that the error can name the rank
/// and the parameter, and informs all ranks. Used only by the reducer, under its mutex; any thread may call skipped()
/// and policy().
class NonFiniteWatch {
 public:
  explicit NonFiniteWatch(NonFinitePolicy policy) : policy_(policy) {}

  NonFinitePolicy policy() const { return policy_; }
  void begin() { first_ = -1; }
  /// Inspects this rank's gradient of a parameter, before the reduction.
  void look(size_t parameter, const at::Tensor& gradient);
  /// Called after the reduction, on every rank. Returns the gradients that are not finite, as the same text on all
  /// ranks; empty if all are finite.
  std::string findings(const Group& group, const std::vector<std::string>& names) const;

  int64_t skipped() const { return skipped_; }
  void count_skipped() { ++skipped_; }

 private:
  const NonFinitePolicy policy_;
  int64_t first_ = -1;  ///< the first such parameter, on this rank, in this reduction
  std::atomic<int64_t> skipped_{0};
};

}  // namespace lockstep
