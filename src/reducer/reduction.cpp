#include "reducer/reduction.h"

#include "rank_page/rank_board.h"

namespace lockstep {

bool is_in_backward_elsewhere(const ReductionParts& parts) {
  return parts.backward.phase == Backward::Phase::kInBackward && parts.plan.on_cpu() &&
         parts.backward.is_of_another_thread();
}

void begin_reduction(ReductionParts& parts) {
  parts.sender.begin();
  parts.message.forget_trouble();
  if (parts.equipment.watch) parts.equipment.watch->begin();
  if (parts.equipment.timeline) parts.equipment.timeline->begin(parts.buckets.size());
}

bool is_interrupted(const ReductionParts& parts) {
  return parts.backward.phase != Backward::Phase::kIdle && parts.sender.sent() > 0;
}

void note_interruption(ReductionParts& parts) {
  parts.message.set_trouble("an exception ended a backward after " + std::to_string(parts.sender.sent()) + " of " +
                            std::to_string(parts.buckets.size()) +
                            " buckets of gradients had been sent, and this rank continued; a rank that catches an "
                            "exception from forward or backward must call skip_step()");
}

void end_reduction(ReductionParts& parts, const std::vector<Facts>& ranks) {
  const std::vector<at::Tensor> kept = parts.buckets.finish();
  parts.last_is_void = is_void(ranks);
  if (parts.last_is_void) {
    drop_gradients(parts.plan.tensors);
    if (parts.equipment.watch) parts.equipment.watch->begin();  // no gradient that it could report is left
  } else {
    parts.agreement.agree_on_kept(kept, ranks);
  }
  parts.message.count_reduction();
  own_page().count_step();
  parts.events.reduced(ranks);
  if (parts.equipment.timeline) parts.equipment.timeline->end(parts.plan.group);
  if (parts.equipment.watch && parts.equipment.watch->policy() != NonFinitePolicy::kIgnore)
    parts.agreement.drop_non_finite(*parts.equipment.watch);
}

}  // namespace lockstep
