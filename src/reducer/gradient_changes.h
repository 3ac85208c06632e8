#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "reducer/buckets.h"
#include "reducer/reduction_plan.h"

namespace lockstep {

/// Detects changes that other code makes to this rank's gradients between backward and the optimizer's step. The
/// gradients lie in its buckets until the step has taken their sum.
class GradientChanges {
 public:
  GradientChanges(const ReductionPlan& plan, const Buckets& buckets) : plan_(plan), buckets_(buckets) {}

  /// Records the present gradients.
  void remember();
  /// The changes made since; empty if none.
  std::string found() const;
  /// The changes found when the next backward begins.
  std::string found_between_passes() const;

  /// Gradients that other code has removed since, by parameter.
  std::vector<bool> dropped() const;
  /// The value of a dropped gradient in a sum over the ranks, which are fewer; a present gradient adds 1.
  static constexpr float kOneDropped = 4096;
  /// Throws on all ranks if some ranks have dropped a gradient that others have. `totals`: the sums over the ranks, by
  /// parameter; `dropped`: this rank's.
  void check_dropped(const std::vector<float>& totals, const std::vector<bool>& dropped) const;

 private:
  std::string found_in(size_t parameter) const;

  const ReductionPlan& plan_;
  const Buckets& buckets_;
  std::vector<uint64_t> marks_;  ///< mark_of() the gradients, by parameter; 0 if not in the bucket
};

}  // namespace lockstep
