#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "reducer/facts.h"
#include "reducer/hook_problems.h"
#include "reducer/non_finite.h"
#include "reducer/rank_message.h"
#include "reducer/reduction_events.h"
#include "reducer/reduction_plan.h"

namespace lockstep {

/// Draws conclusions from the facts that all ranks sent with a reduction (RankMessage). All ranks reach the same
/// conclusions and throw the same errors.
/// REQUIRES: every rank calls each function with the same `rows`, the table of facts (usually one row per rank).
class RankAgreement {
 public:
  RankAgreement(const ReductionPlan& plan, RankMessage& message, const HookProblems& hook_problems,
                const ReductionEvents& events)
      : plan_(plan), message_(message), hook_problems_(hook_problems), events_(events) {}

  /// Throws if a rank is in trouble, or acts differently from the others.
  void check(const std::vector<Facts>& rows);
  /// Throws if ranks ran different numbers of backward passes.
  void check_passes(const std::vector<Facts>& rows) const;
  /// The factor for the reduced gradients.
  double factor(const std::vector<Facts>& rows) const;
  /// Parameters that no rank has reached keep their .grad. If a rank has skipped its share, all take the .grad of the
  /// first rank that has not, because a failed backward may have added to .grad.
  void agree_on_kept(const std::vector<at::Tensor>& kept, const std::vector<Facts>& rows) const;
  /// Whether gradients are not finite; if so, drops them all. Throws if that is the policy.
  bool drop_non_finite(NonFiniteWatch& watch) const;

 private:
  /// For texts with the ranks' numbers in a subgroup (PageGroup::names_of_ranks()).
  std::string names_of_ranks() const;
  void check_objects(const std::vector<Facts>& rows) const;
  [[noreturn]] void throw_trouble_of_all();
  void check_joined(const std::vector<Facts>& rows) const;
  void check_data(const std::vector<Facts>& rows);
  void check_local_steps(const std::vector<Facts>& rows);
  void check_policies(const std::vector<Facts>& rows) const;
  void check_settings(const std::vector<Facts>& rows) const;

  const ReductionPlan& plan_;
  RankMessage& message_;
  const HookProblems& hook_problems_;
  const ReductionEvents& events_;
};

/// The backward passes of each rank; -1 for a rank that contributes no gradients, which leaves nothing to compare.
std::vector<int> compared_passes(const std::vector<Facts>& rows);

/// Throws the same Error on all ranks if they have set their replicas differently, or have frozen different parameters.
/// Only ranks with inputs are compared (`active`: this one has them).
/// REQUIRES: every rank calls it.
void throw_different_settings(const Group& group, const ReductionEvents& events, bool active);

/// The end of messages about ranks that did something a different number of times. `joining`: within join().
inline std::string advice_on_numbers(bool joining) {
  return std::string(joining ? "within join(), let the body end when a rank's batches do, and make the other "
                               "collective calls of the loop in JoinOptions::shadow, too"
                             : "if ranks have different numbers of batches, run the loop within join()") +
         "; if a rank decides by its own loss, decide by group.mean(loss), which is the same on all ranks";
}

}  // namespace lockstep
