#include "optim/step_agreement.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/rank_names.h"
#include "optim/common_trouble.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

/// Columns of a rank's row.
enum Column : int64_t { kTrouble, kAction, kMaxNorm, kNormType, kStep, kGradients, kParameters, kLoaded, kColumns };

/// A column of the rows, one number per rank.
std::vector<int64_t> column(const at::Tensor& rows, int64_t index) {
  const at::Tensor values = rows.select(1, index).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

/// Returns a row for each rank.
at::Tensor exchange_rows(const Group& group, const StepStatement& mine) {
  const at::Tensor row = at::empty({kColumns}, at::kLong);
  auto* said = row.mutable_data_ptr<int64_t>();
  said[kTrouble] = mine.trouble.empty() ? 0 : 1;
  said[kAction] = static_cast<int64_t>(mine.request.action);
  said[kMaxNorm] = std::bit_cast<int64_t>(mine.request.max_norm);
  said[kNormType] = std::bit_cast<int64_t>(mine.request.norm_type);
  said[kStep] = static_cast<int64_t>(mine.step);
  said[kGradients] = static_cast<int64_t>(mine.gradients);
  said[kParameters] = static_cast<int64_t>(mine.parameters);
  said[kLoaded] = static_cast<int64_t>(mine.loaded);
  return group.all_gather(row);
}

}  // namespace

StepRequest agree_on_step(const Group& group, const StepStatement& mine) {
  const OperationLabel label("what ranks say before an optimizer's step");
  const at::Tensor all = exchange_rows(group, mine);
  if (all.select(1, kTrouble).any().item<bool>()) {
    const auto texts = group.all_gather_bytes(mine.trouble);
    const auto& first = *std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
    throw Error(ranks_with(texts, first) + ": " + first);
  }
  constexpr auto kFollows = static_cast<int64_t>(StepAction::kFollow);
  const auto actions = column(all, kAction);
  const auto leader = static_cast<size_t>(
      std::find_if(actions.begin(), actions.end(), [](int64_t one) { return one != kFollows; }) - actions.begin());
  const auto refuse_odd = [&](Column what, bool of_followers, const char* does, const std::string& advice) {
    std::vector<bool> odd;
    const auto values = column(all, what);
    for (size_t rank = 0; rank < values.size(); ++rank)
      odd.push_back(values[rank] != values[leader] && (of_followers || actions[rank] != kFollows));
    if (std::find(odd.begin(), odd.end(), true) == odd.end()) return;
    throw Error("ZeroRedundancyOptimizer: " + rank_names(odd) + does + " than rank " + std::to_string(leader) + advice);
  };
  constexpr const char* kSameCalls =
      "; every rank must call clip_grad_norm() and step() in the same order, with the same arguments";
  refuse_odd(kAction, false, " has called the other one of clip_grad_norm() and step()", kSameCalls);
  for (const Column what : {kMaxNorm, kNormType})
    refuse_odd(what, false, " has called clip_grad_norm() with other arguments", kSameCalls);
  const StepRequest agreed{static_cast<StepAction>(actions[leader]),
                           std::bit_cast<double>(column(all, kMaxNorm)[leader]),
                           std::bit_cast<double>(column(all, kNormType)[leader])};
  refuse_odd(kLoaded, true, " loaded another state into the parameters", std::string(", or none") + kLoadTheSame);
  refuse_odd(kParameters, true, " has other parameters", kOtherParameters);
  if (agreed.action != StepAction::kStep) return agreed;
  refuse_odd(
      kStep, true, " would step other parameters",
      ", at another rate or from another state; set options and load states on every rank, remove gradients on all "
      "ranks or on none, and set learning rates in JoinOptions::shadow, too, where a rank has run out of inputs");
  refuse_odd(kGradients, true, " has other gradients",
             ", so they were not reduced over all ranks, or were changed since; to step with each rank's own gradients "
             "(post-local SGD), make an optimizer from the parameters on each rank");
  return agreed;
}

}  // namespace lockstep::detail
