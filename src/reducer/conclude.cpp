#include <algorithm>
#include <functional>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/rank_names.h"
#include "collectives/coalesced.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "reducer/reducer.h"

// What all ranks conclude, each for itself and all the same, from what every rank has told with a reduction.

namespace lockstep {

void Reducer::judge_objects(const std::vector<Facts>& ranks) {
  if (std::all_of(ranks.begin(), ranks.end(), [&](const Facts& facts) { return facts.object == ranks[0].object; }))
    return;
  const OperationLabel label("which model each rank reduces");
  const auto objects =
      group_.all_gather_bytes("number " + std::to_string(settings_.object) + " (" + names_[plan_.front().front()] +
                              " to " + names_[plan_.back().back()] + ")");
  std::string text;
  for (size_t rank = 0; rank < objects.size(); ++rank)
    if (std::find(objects.begin(), objects.begin() + static_cast<std::ptrdiff_t>(rank), objects[rank]) ==
        objects.begin() + static_cast<std::ptrdiff_t>(rank))
      text += (text.empty() ? "" : ", ") + ranks_with(objects, objects[rank]) + " those of " + objects[rank];
  text = "the ranks reduced gradients of different DistributedDataParallel objects: " + text +
         ", counted in the order in which they were attached to this group. Run their backward passes in the same "
         "order on every rank, or give each object a subgroup of its own";
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

void Reducer::judge(const std::vector<Facts>& ranks) {
  judge_objects(ranks);
  const auto any = [&](bool Facts::*fact) { return std::any_of(ranks.begin(), ranks.end(), std::mem_fn(fact)); };
  if (any(&Facts::trouble)) {
    const OperationLabel label("what is wrong on each rank");
    const auto troubles = group_.all_gather_bytes(std::exchange(trouble_, ""));
    std::string text;
    for (const std::string& trouble : troubles) {
      if (trouble.empty() || text.find(trouble) != std::string::npos) continue;
      text += (text.empty() ? "" : "\n") + ranks_with(troubles, trouble) + ": " + trouble;
    }
    const auto first = std::find_if(troubles.begin(), troubles.end(), [](const auto& t) { return !t.empty(); });
    const bool mine = !troubles[static_cast<size_t>(group_.rank())].empty();
    // Ranks of a subgroup have other numbers for the launcher.
    const bool all = launchers_board() != nullptr && launchers_board()->world_size() == group_.world_size();
    own_page().fail(mine ? RankFailure::kOwn : RankFailure::kPeer,
                    all && !mine ? static_cast<int>(first - troubles.begin()) : -1, text);
    throw Error(text);
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].active && !ranks[rank].joining &&
        !std::all_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::active)))
      throw Error("rank " + std::to_string(rank) +
                  " ran a backward outside of join() while others have run out of inputs within it; every rank must "
                  "call join()");
  judge_passes(ranks);
}

void Reducer::judge_passes(const std::vector<Facts>& ranks) const {
  // -1 stands for ranks that have none to compare: those that bring no gradients.
  std::vector<int> passes;
  for (const Facts& facts : ranks) passes.push_back(facts.took_part() && facts.passes > 0 ? facts.passes : -1);
  const int first = *std::max_element(passes.begin(), passes.end());
  for (const int other : passes)
    if (other != -1 && other != first)
      throw Error(
          "the ranks ran different numbers of backward passes before reducing gradients, beginning with those of " +
          (plan_.empty() ? "" : names_[plan_.front().front()]) + ": " + std::to_string(other) + " on " +
          ranks_with(passes, other) + " and " + std::to_string(first) + " on " + ranks_with(passes, first) +
          ". Every rank must run the same number, with no_sync() or accumulate() around the same ones.");
}

void Reducer::scale(const std::vector<Facts>& ranks) {
  double factor = 1;
  if (settings_.reduction == GradientReduction::kWeightedMean) {
    double total = 0;
    for (const Facts& facts : ranks) total += facts.took_part() ? facts.weight : 0;
    factor = total > 0 ? 1 / total : 0;
  } else if (settings_.reduction == GradientReduction::kMean) {
    // Ranks that are out of inputs count or not, as join() was told; those that skip never do.
    const auto out = [&](const Facts& facts) { return facts.skipped || (divide_by_active_ && !facts.active); };
    const auto counted =
        static_cast<double>(ranks.size()) - static_cast<double>(std::count_if(ranks.begin(), ranks.end(), out));
    if (counted > 0) factor = static_cast<double>(ranks.size()) / counted;
  }
  at::NoGradGuard no_grad;
  if (factor != 1)
    for (Bucket& bucket : buckets_) bucket.gradients().mul_(factor);
}

void Reducer::finish_buckets(const std::vector<Facts>& ranks) {
  std::vector<at::Tensor> kept;
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const size_t slot : buckets_[b].finish()) kept.push_back(tensors_[plan_[b][slot]]);
  if (is_void(ranks)) {
    for (const at::Tensor& tensor : tensors_) tensor.mutable_grad().reset();
    if (equipment_.watch) equipment_.watch->begin();  // nothing is left that it could speak of
  } else if (std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::skipped))) {
    agree_on_kept(kept, first_that_took_part(ranks));
  }
}

/// A backward that failed may have added to what a parameter kept that no other rank reached.
void Reducer::agree_on_kept(const std::vector<at::Tensor>& kept, int root) {
  if (kept.empty()) return;
  const OperationLabel label("gradients that a skipped step leaves as they were");
  std::string mine;
  for (const at::Tensor& tensor : kept) mine += tensor.grad().defined() ? '1' : '0';
  const std::string theirs = group_.all_gather_bytes(mine)[static_cast<size_t>(root)];
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < kept.size(); ++i) {
    at::Tensor& gradient = kept[i].mutable_grad();
    if (theirs[i] == '0')
      gradient.reset();
    else
      gradients.push_back(gradient.defined() ? gradient : gradient = at::zeros_like(kept[i]));
  }
  broadcast_coalesced(group_, gradients, root);
}

}  // namespace lockstep
