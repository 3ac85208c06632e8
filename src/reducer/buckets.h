#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "reducer/bucket.h"
#include "reducer/non_finite.h"
#include "reducer/rank_message.h"
#include "reducer/reduction_plan.h"
#include "reducer/timeline.h"

namespace lockstep {

/// User additions to a reduction; each may be null.
struct ReductionEquipment {
  CommHookPtr hook;
  std::shared_ptr<NonFiniteWatch> watch;
  std::shared_ptr<Timeline> timeline;
};

/// The buckets of a plan. Problems with gradients are written to the rank's message.
class Buckets {
 public:
  /// REQUIRES: the arguments outlive the object.
  Buckets(const ReductionPlan& plan, const ReductionEquipment& equipment, RankMessage& message);

  const std::vector<Bucket>& all() const { return buckets_; }
  size_t size() const { return buckets_.size(); }
  Bucket& operator[](size_t bucket) { return buckets_[bucket]; }
  Bucket& last() { return buckets_.back(); }
  GradientSlot& slot_of(size_t parameter);
  const GradientSlot& slot_of(size_t parameter) const;

  /// Takes the parameter's .grad (Bucket::fill). `used`: a backward has reached it since the last reduction.
  void fill(size_t parameter, bool used);
  /// Fills all slots that are not filled yet.
  void fill_rest(const std::vector<bool>& used);
  /// Fills the buckets after the first `begin` with zeros: this rank contributes nothing.
  void fill_with_zeros(size_t begin);
  /// Tells the timeline that a bucket may have become full.
  void note_filled(size_t bucket) const;
  void multiply(double factor);
  void apply_weight(Bucket& bucket) const;

  /// Called when all buckets are reduced: leaves the result in .grad. Returns the parameters that no rank has used.
  std::vector<at::Tensor> finish();
  /// Discards the contents.
  void reset();

 private:
  const ReductionPlan& plan_;
  const ReductionEquipment& equipment_;
  RankMessage& message_;
  std::vector<Bucket> buckets_;
};

}  // namespace lockstep
