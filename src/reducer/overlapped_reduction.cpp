#include "reducer/overlapped_reduction.h"

#include <algorithm>
#include <functional>

namespace lockstep {

void OverlappedReduction::begin() {
  if (is_interrupted(parts_)) {
    note_interruption(parts_);
    reduce_all(Share::kGradients);
  }
  begin_reduction(parts_);
}

void OverlappedReduction::before_gradient(size_t parameter) {
  if (parts_.plan.rank_zero_adds_it() && parts_.plan.has_buckets()) parts_.buckets.slot_of(parameter).forget_reduced();
}

void OverlappedReduction::ready(size_t parameter) {
  if (!parts_.backward.reduces) return;
  if (!parts_.plan.has_buckets()) {
    if (parts_.equipment.watch) parts_.equipment.watch->look(parameter, parts_.plan.tensors[parameter].grad());
    return;
  }
  parts_.backward.look_whether_nested();
  if (parts_.sender.is_under_way(parameter)) {  // late: the gradient stays in .grad until the end
    if (const char* problem = parts_.buckets.slot_of(parameter).problem())
      parts_.message.note_trouble(parameter, problem);
    return;
  }
  parts_.buckets.fill(parameter, /*used=*/true);
  if (!parts_.backward.is_nested) parts_.sender.send_full(/*at_end=*/false);
}

void OverlappedReduction::backward_ended() {
  if (parts_.backward.reduces) reduce_all(Share::kGradients);
}

void OverlappedReduction::reduce() {
  begin();
  // Within join() this rank's inputs may have ended within an accumulation.
  reduce_all(Share::kGradients, parts_.message.facts().joining ? 0 : parts_.passes.since_reduction);
}

void OverlappedReduction::skip() {
  if (!is_interrupted(parts_)) begin();
  parts_.message.forget_trouble();
  if (parts_.equipment.watch) parts_.equipment.watch->begin();
  reduce_all(Share::kSkipped);
}

std::optional<std::vector<Facts>> OverlappedReduction::shadow() {
  begin();
  return reduce_all(Share::kOutOfInputs);
}

void OverlappedReduction::fail(const std::string& trouble) {
  begin();
  parts_.message.set_trouble(trouble);
  reduce_all(Share::kGradients);
}

std::vector<Facts> OverlappedReduction::add_up_buckets(Share share, int passes) {
  Buckets& buckets = parts_.buckets;
  parts_.message.prepare(share, passes, /*spoiled=*/parts_.sender.sent() > 0, parts_.events);
  Facts& mine = parts_.message.facts();
  if (!mine.took_part()) buckets.fill_with_zeros(/*begin=*/parts_.sender.sent());
  buckets.fill_rest(parts_.backward.reached);
  mine.late = parts_.sender.set_aside_late();
  if (!parts_.plan.has_buckets()) {
    mine.trouble = !parts_.message.trouble().empty();
    return {mine};
  }
  const auto write_row = [&] { parts_.message.write_row(buckets.last().notes()); };
  write_row();
  parts_.sender.send_full(/*at_end=*/true);
  parts_.sender.wait(write_row);
  return read_facts(buckets.last().notes(), parts_.plan.averages());
}

std::vector<Facts> OverlappedReduction::reduce_all(Share share, int passes) {
  parts_.backward.phase = Backward::Phase::kIdle;
  if (share == Share::kGradients && parts_.events.reducing) parts_.events.reducing();
  const std::vector<Facts> ranks = add_up_buckets(share, passes);
  parts_.passes.note_reduction();
  parts_.backward.forget_reached();
  parts_.agreement.check(ranks);
  parts_.agreement.check_passes(ranks);
  if (std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::late))) parts_.sender.reduce_late();
  parts_.buckets.multiply(parts_.agreement.factor(ranks));
  end_reduction(parts_, ranks);
  return ranks;
}

}  // namespace lockstep
