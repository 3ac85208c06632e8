#pragma once

#include <atomic>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/non_finite_policy.h>

namespace lockstep {

/// Notices gradients that hold infinity or NaN before they are mixed with those of other ranks, so that the error can
/// name rank and parameter, and tells all ranks. Only the reducer uses it, under its mutex; skipped() and policy() may
/// be called from any thread.
class NonFiniteWatch {
 public:
  explicit NonFiniteWatch(NonFinitePolicy policy) : policy_(policy) {}

  NonFinitePolicy policy() const { return policy_; }
  void begin() { first_ = -1; }
  /// This rank's gradient of a parameter, before the reduction.
  void look(size_t parameter, const at::Tensor& gradient);
  /// After the reduction, on every rank: which gradients are not finite, the same text on all ranks; empty if all are
  /// finite.
  std::string findings(const Group& group, const std::vector<std::string>& names) const;

  int64_t skipped() const { return skipped_; }
  void count_skipped() { ++skipped_; }

 private:
  const NonFinitePolicy policy_;
  int64_t first_ = -1;  ///< the first such parameter, on this rank, in this reduction
  std::atomic<int64_t> skipped_{0};
};

}  // namespace lockstep
