#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>

#include "base/summation_tree.h"

namespace lockstep {

/// Sums one bucket over all virtual ranks when the group's own reduction cannot: because a rank has several pieces,
/// because the tree over the pieces differs from that over the ranks, or because partial sums are wider than the
/// bucket.
///
/// Each rank receives its slice of all pieces and adds them in the tree's order; then all ranks receive all slices. For
/// each piece, this sends about as many bytes as a reduction in slices.
class PieceExchange final : public CommHook {
 public:
  /// `finish` converts the sums to their final form, elementwise.
  PieceExchange(const CombinePlan& plan, const Group& group, const at::Tensor& gradients,
                std::function<at::Tensor(at::Tensor sum)> finish);

  /// This rank's piece: elements as in the bucket, in the type of the sums.
  /// REQUIRES: filled before reduce().
  at::Tensor piece(size_t number) const { return pieces_[static_cast<int64_t>(number)]; }

  /// Leaves the result in the bucket's gradients.
  Finish reduce(const GradientBucket& bucket, const Group& group) override;

 private:
  Finish reduce_as_ranks_do(const GradientBucket& bucket, const Group& group) const;

  const CombinePlan& plan_;
  const std::function<at::Tensor(at::Tensor)> finish_;
  std::vector<int64_t> counts_;  ///< pieces of each rank
  int64_t slice_;                ///< elements of each rank's slice
  at::Tensor pieces_;            ///< [this rank's pieces, ranks * slice]
};

}  // namespace lockstep
