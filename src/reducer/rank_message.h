#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include <ATen/core/Tensor.h>

#include "base/data_passes.h"
#include "reducer/facts.h"
#include "reducer/reduction_events.h"
#include "reducer/reduction_plan.h"

namespace lockstep {

/// This rank's message to the others with the next reduction: its facts, and any trouble that it has found. A rank in
/// trouble continues, because the others wait for its buckets; the trouble is sent with them, and all ranks throw it
/// together (RankAgreement).
class RankMessage {
 public:
  explicit RankMessage(const ReductionPlan& plan);

  Facts& facts() { return facts_; }
  const Facts& facts() const { return facts_; }
  /// Within join(): ranks may become inactive. `divide_by_active`: the mean is over the active ranks only.
  void set_joining(bool joining, bool divide_by_active);
  /// The factor for this rank's buckets before they are summed.
  double weight() const { return plan_.weights_buckets() ? facts_.weight : 1; }
  /// Copies the message that another reducer of this rank would have sent.
  void take_over_from(const RankMessage& before);

  /// The trouble; empty if none.
  const std::string& trouble() const { return trouble_; }
  void set_trouble(std::string trouble) { trouble_ = std::move(trouble); }
  /// Replaces any earlier trouble. The next reduction reports it, whatever happens before.
  void set_lasting_trouble(std::string trouble);
  /// Sets the trouble unless there is one already.
  void note_trouble(const std::string& trouble);
  void note_trouble(size_t parameter, const std::string& what);
  /// Called when a reduction begins: discards the trouble unless it lasts.
  void forget_trouble();
  /// Returns the trouble, for reporting to all ranks, and clears it.
  std::string hand_over_trouble();

  /// Notes that parameters have changed while gradients waited in .grad. It is an error if the replicas differ now,
  /// which the next reduction finds out.
  void note_local_step(const std::string& what) { local_step_ = what; }
  /// What was noted since the last hand_over_local_step(); empty if nothing.
  const std::string& local_step() const { return local_step_; }
  std::string hand_over_local_step() { return std::exchange(local_step_, ""); }

  /// Sets facts and trouble for the coming reduction, except for problems found when the buckets are filled. `passes`:
  /// backward passes since the last reduction; `spoiled`: gradients of a skipped step have been sent.
  void prepare(Share share, int passes, bool spoiled, const ReductionEvents& events);
  void write_row(const at::Tensor& table);

  /// Number of reductions of this rank.
  uint64_t reductions() const { return reductions_; }
  void count_reduction() { ++reductions_; }
  /// Passes that loaders have begun since the last reduction.
  const NewPasses& loader_passes() const { return loader_passes_; }
  bool divides_by_active() const { return divide_by_active_; }
  /// Whether this is the first reduction since join() began; the next one is not.
  bool is_first_within_join() { return std::exchange(join_begins_, false); }

 private:
  const ReductionPlan& plan_;
  Facts facts_;
  std::string trouble_, local_step_;
  bool trouble_lasts_ = false;
  bool divide_by_active_ = false;
  bool join_begins_ = false;  ///< not sent: no reduction since join() began
  NewPasses loader_passes_;
  uint64_t loader_passes_seen_;
  uint64_t reductions_ = 0;
};

}  // namespace lockstep
