#pragma once

#include "reducer/reduction.h"

namespace lockstep {

/// Reduces gradients while backward runs. A ready gradient is copied into its bucket, and full buckets are sent in the
/// order of the plan. When the backward has ended, the slots of parameters without a gradient are filled, the remaining
/// buckets are sent, and this rank waits for all of them; then .grad is reduced.
///
/// A nested backward (activation recomputation) may produce another gradient for a parameter. Once that has happened,
/// buckets are sent only at the end. Gradients that were late before are reduced in a second message.
///
/// A rank may skip its share. It then contributes zeros, the mean is over the others, and it receives their result. A
/// bucket that its failed backward has already sent cannot be recalled, and makes the step void on all ranks.
class OverlappedReduction final : public Reduction {
 public:
  explicit OverlappedReduction(ReductionParts& parts) : parts_(parts) {}

  void begin() override;
  void backward_begins() override {}
  void before_gradient(size_t parameter) override;
  bool acts_before_gradients() const override { return parts_.plan.rank_zero_adds_it(); }
  void ready(size_t parameter) override;
  void backward_ended() override;
  void reduce() override;
  void skip() override;
  std::optional<std::vector<Facts>> shadow() override;
  void fail(const std::string& trouble) override;
  void equipment_changed() override { parts_.sender.send_all_through(parts_.equipment.hook.get()); }

 private:
  std::vector<Facts> reduce_all(Share share) { return reduce_all(share, parts_.passes.since_reduction); }
  /// `passes` are compared with those of other ranks, unless there are none.
  std::vector<Facts> reduce_all(Share share, int passes);
  /// Fills and sends the remaining buckets, and waits. Returns the facts of all ranks; the buckets then hold the sums.
  std::vector<Facts> add_up_buckets(Share share, int passes);

  ReductionParts& parts_;
};

}  // namespace lockstep
