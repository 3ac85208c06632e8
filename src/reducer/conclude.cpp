#include <algorithm>
#include <functional>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/rank_names.h"
#include "collectives/coalesced.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "reducer/data_agreement.h"
#include "reducer/reducer.h"
#include "reducer/same_number.h"

// What each rank concludes from the facts that all ranks sent with a reduction. All come to the same conclusions.

namespace lockstep {

void Reducer::judge_objects(const std::vector<Facts>& ranks) const {
  if (std::all_of(ranks.begin(), ranks.end(), [&](const Facts& facts) { return facts.object == ranks[0].object; }))
    return;
  const OperationLabel label("which model each rank reduces");
  const auto objects = fixed_.group.all_gather_bytes("number " + std::to_string(fixed_.settings.object) + " (" +
                                                     fixed_.names[fixed_.plan.front().front()] + " to " +
                                                     fixed_.names[fixed_.plan.back().back()] + ")");
  std::string text;
  for (size_t rank = 0; rank < objects.size(); ++rank)
    if (std::find(objects.begin(), objects.begin() + static_cast<std::ptrdiff_t>(rank), objects[rank]) ==
        objects.begin() + static_cast<std::ptrdiff_t>(rank))
      text += (text.empty() ? "" : ", ") + ranks_with(objects, objects[rank]) + " those of " + objects[rank];
  text = "the ranks reduced gradients of different DistributedDataParallel objects: " + text +
         ", numbered in the order in which they were attached to this group. Run their backward passes in the same "
         "order on every rank, or give each object its own subgroup";
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

void Reducer::judge(const std::vector<Facts>& ranks) {
  judge_objects(ranks);
  const auto any = [&](bool Facts::*fact) { return std::any_of(ranks.begin(), ranks.end(), std::mem_fn(fact)); };
  if (any(&Facts::trouble)) {
    const OperationLabel label("what is wrong on each rank");
    message_.lasting = false;
    const std::string own = std::exchange(message_.trouble, "");
    std::vector<std::string> troubles;
    try {
      troubles = fixed_.group.all_gather_bytes(own);
    } catch (const Error& error) {
      throw Error((own.empty() ? "" : own + "\n") + error.what() + hook_problems());
    }
    std::string text;
    for (const std::string& trouble : troubles) {
      if (trouble.empty() || text.find(trouble) != std::string::npos) continue;
      text += (text.empty() ? "" : "\n") + ranks_with(troubles, trouble) + ": " + trouble;
    }
    const auto first = std::find_if(troubles.begin(), troubles.end(), [](const auto& t) { return !t.empty(); });
    const bool mine = !troubles[static_cast<size_t>(fixed_.group.rank())].empty();
    // The launcher knows the ranks of a subgroup by other numbers.
    const bool all = launchers_board() != nullptr && launchers_board()->world_size() == fixed_.group.world_size();
    own_page().fail(mine ? RankFailure::kOwn : RankFailure::kPeer,
                    all && !mine ? static_cast<int>(first - troubles.begin()) : -1, text);
    throw Error(text);
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].active && !ranks[rank].joining &&
        !std::all_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::active)))
      throw Error(fixed_.row() + (" " + std::to_string(rank)) +
                  " ran a backward outside of join() while others have run out of inputs within it; every rank must "
                  "call join()");
  judge_data(ranks);
  judge_passes(ranks);
  judge_idle(ranks);
}

void Reducer::note_passes() {
  message_.passes = passes_since(message_.passes_seen);
  message_.facts.data = hash_of(message_.passes);
  message_.facts.odd_shard = reads_of_another(message_.passes, fixed_.group);
}

void Reducer::judge_data(const std::vector<Facts>& ranks) {
  const bool begins = std::exchange(message_.begins_join, false);
  const bool joining = std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::joining));
  // Within join() ranks come to their next passes at different reductions.
  if (fixed_.group.world_size() == 1 || (joining && !begins) || !differ_in_data(ranks)) return;
  compare_passes(fixed_.group, message_.passes, joining);
}

void Reducer::judge_idle(const std::vector<Facts>& ranks) const {
  std::vector<bool> idle, busy;
  for (const Facts& facts : ranks) {
    idle.push_back(facts.took_part() && facts.idle);
    busy.push_back(facts.took_part() && !facts.idle);
  }
  const auto any = [](const std::vector<bool>& of) { return std::find(of.begin(), of.end(), true) != of.end(); };
  if (any(idle) && any(busy))
    throw Error("an optimizer's step: no backward ran since the last one on " + rank_names(idle) + ", but some did on " +
                rank_names(busy) +
                "; every rank must run the same number of backward passes. A rank that has nothing to contribute calls "
                "skip_step() in place of its backward; where batches run out, " LOCKSTEP_WITHIN_JOIN);
}

void Reducer::judge_passes(const std::vector<Facts>& ranks) const {
  // -1: the rank contributes no gradients, so there is nothing to compare.
  std::vector<int> passes;
  for (const Facts& facts : ranks) passes.push_back(facts.took_part() && facts.passes > 0 ? facts.passes : -1);
  const int first = *std::max_element(passes.begin(), passes.end());
  const std::string where = fixed_.virtual_ranks ? "virtual " : "";
  for (const int other : passes)
    if (other != -1 && other != first && deferral_)
      throw Error(
          "the ranks come to this optimizer's step with different numbers of backward passes since their last one: " +
          std::to_string(other) + " on " + ranks_with(passes, other) + " and " + std::to_string(first) + " on " +
          ranks_with(passes, first) + ". A step was left out on " + ranks_with(passes, first) +
          ", or they ran more backward passes. Call step() on every rank after the same passes, with no_sync() or "
          "accumulate() around the same ones; a rank that is to contribute nothing calls skip_step() in place of its "
          "backward, and then step()");
    else if (other != -1 && other != first)
      throw Error(
          "the ranks ran different numbers of backward passes before reducing gradients, beginning with those of " +
          (fixed_.plan.empty() ? "" : fixed_.names[fixed_.plan.front().front()]) + ": " + std::to_string(other) +
          " on " + where + ranks_with(passes, other) + " and " + std::to_string(first) + " on " + where +
          ranks_with(passes, first) +
          ". Every rank must run the same number, with no_sync() or accumulate() around the same passes.");
}

double Reducer::factor(const std::vector<Facts>& ranks) const {
  if (fixed_.settings.reduction == GradientReduction::kSum) return 1;
  if (fixed_.settings.reduction == GradientReduction::kWeightedMean) {
    double total = 0;
    for (const Facts& facts : ranks) total += facts.took_part() ? facts.weight : 0;
    return total > 0 ? 1 / total : 0;
  }
  // Whether ranks that are out of inputs count is an option of join(); those that skip never count.
  size_t counted = 0;
  for (const Facts& facts : ranks)
    if (!facts.skipped && (facts.active || !message_.divide_by_active)) ++counted;
  return counted > 0 ? static_cast<double>(ranks.size()) / static_cast<double>(counted) : 1;
}

void Reducer::finish_buckets(const std::vector<Facts>& ranks) {
  std::vector<at::Tensor> kept;
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const size_t slot : buckets_[b].finish()) kept.push_back(fixed_.tensors[fixed_.plan[b][slot]]);
  if (is_void(ranks)) {
    drop_gradients();
    if (equipment_.watch) equipment_.watch->begin();  // no gradient is left that it could report
  } else if (std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::skipped))) {
    agree_on_kept(kept, fixed_.rank_of_row(first_that_took_part(ranks)));
  }
}

/// A backward that failed may have added to the .grad of a parameter that no other rank reached.
void Reducer::agree_on_kept(const std::vector<at::Tensor>& kept, int root) const {
  if (kept.empty()) return;
  const OperationLabel label("gradients that a skipped step leaves as they were");
  std::string mine;
  for (const at::Tensor& tensor : kept) mine += tensor.grad().defined() ? '1' : '0';
  const std::string theirs = fixed_.group.all_gather_bytes(mine)[static_cast<size_t>(root)];
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < kept.size(); ++i) {
    at::Tensor& gradient = kept[i].mutable_grad();
    if (theirs[i] == '0')
      gradient.reset();
    else
      gradients.push_back(gradient.defined() ? gradient : gradient = at::zeros_like(kept[i]));
  }
  broadcast_coalesced(fixed_.group, gradients, root);
}

void Reducer::drop_gradients() const {
  for (const at::Tensor& tensor : fixed_.tensors) tensor.mutable_grad().reset();
}

bool Reducer::judge_non_finite() {
  const OperationLabel label("the search for non-finite gradients");
  const std::string findings = equipment_.watch->findings(fixed_.group, fixed_.names);
  if (findings.empty()) return false;
  drop_gradients();
  if (equipment_.watch->policy() == NonFinitePolicy::kRaise) {
    own_page().fail(RankFailure::kDiverged, -1, findings);
    throw Error(findings + " (reduction " + std::to_string(reductions_) +
                "); no gradient is left on any rank, so the step can be skipped");
  }
  equipment_.watch->count_skipped();
  return true;
}

}  // namespace lockstep
