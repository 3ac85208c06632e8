#include "reducer/piece_exchange.h"

#include <utility>

#include <ATen/ATen.h>

#include "reducer/virtual_step.h"

namespace lockstep {

PieceExchange::PieceExchange(const CombinePlan& plan, const Group& group, const at::Tensor& gradients,
                             std::function<at::Tensor(at::Tensor)> finish)
    : plan_(plan), finish_(std::move(finish)) {
  const int64_t ranks = group.world_size();
  for (int64_t rank = 0; rank < ranks; ++rank)
    counts_.push_back(plan.first_piece[static_cast<size_t>(rank + 1)] - plan.first_piece[static_cast<size_t>(rank)]);
  slice_ = (gradients.numel() + ranks - 1) / ranks;
  const int64_t own = counts_[static_cast<size_t>(group.rank())];
  const at::TensorOptions options = gradients.options().dtype(sum_type(gradients.scalar_type())).requires_grad(false);
  pieces_ = group.allocate(own * ranks * slice_, options).view({own, ranks * slice_});
  pieces_.zero_();
}

CommHook::Finish PieceExchange::reduce_as_ranks_do(const GradientBucket& bucket, const Group& group) const {
  const at::Tensor sum = pieces_[0];
  return [this, sum, gradients = bucket.gradients, work = group.all_reduce_async(sum, ReduceOp::kSum)] {
    work.wait();
    gradients.copy_(finish_(sum.narrow(0, 0, gradients.numel())));
  };
}

CommHook::Finish PieceExchange::reduce(const GradientBucket& bucket, const Group& group) {
  if (plan_.is_tree_over_ranks) return reduce_as_ranks_do(bucket, group);
  const int64_t ranks = group.world_size(), own = pieces_.size(0);
  const at::Tensor sent = pieces_.view({own, ranks, slice_}).transpose(0, 1).reshape({ranks * own, slice_});
  const at::Tensor received = at::empty({static_cast<int64_t>(plan_.pieces.size()), slice_}, pieces_.options());
  const std::vector<int64_t> to_each(static_cast<size_t>(ranks), own);
  Work work = group.all_to_all_async(received, sent, to_each, counts_);
  return [this, group, sent, received, gradients = bucket.gradients, work] {
    work.wait();
    for (const auto& [into, from] : plan_.sums) received[into].add_(received[from]);
    const at::Tensor slice = finish_(received[0]).to(gradients.scalar_type()).contiguous();
    gradients.copy_(group.all_gather(slice).view(-1).narrow(0, 0, gradients.numel()));
  };
}

}  // namespace lockstep
