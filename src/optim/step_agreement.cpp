#include <algorithm>
#include <bit>
#include <cstring>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/rank_names.h"
#include "optim/common_trouble.h"
#include "optim/sharded_step.h"
#include "rank_page/operation_label.h"

// What ranks tell each other before they touch memory of all: what each is about to do, or why it cannot.

namespace lockstep::detail {
namespace {

uint64_t hash_of(const optim::StepConstants& constants) {
  uint64_t hash = Hash::kStart;
  for (const double value : {constants.weight_decay, constants.decay, constants.step_size, constants.momentum,
                             constants.dampened, constants.beta2, constants.root, constants.eps}) {
    uint64_t word;
    std::memcpy(&word, &value, sizeof word);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

/// Of what a rank says.
enum Column : int64_t { kTrouble, kAction, kMaxNorm, kNormType, kSteps, kGradients, kParameters, kColumns };

/// A column of the rows, one number a rank.
std::vector<int64_t> column(const at::Tensor& rows, int64_t index) {
  const at::Tensor values = rows.select(1, index).contiguous();
  return {values.const_data_ptr<int64_t>(), values.const_data_ptr<int64_t>() + values.numel()};
}

}  // namespace

std::string ShardedStep::trouble(const torch::optim::Optimizer& optimizer) const {
  if (model_.shared_step != this)
    return "ZeroRedundancyOptimizer: another one was made from this model after it; step that one";
  if (model_.join.options != nullptr && model_.equipment.hook)
    return "ZeroRedundancyOptimizer::step() within join() with a communication hook: ranks that have run out of inputs "
           "would not call it; remove the hook, or step with the optimizer of each rank, made from the parameters";
  if (model_.join.options != nullptr && !model_.is_deferred()) return kNoStepWithinJoin;
  return common_trouble(model_, optimizer, areas_);
}

at::Tensor ShardedStep::say(const Request& mine, const std::string& trouble,
                            const std::vector<optim::Intent>& intents) const {
  uint64_t steps = Hash::kStart;
  std::vector<at::Tensor> gradients;
  for (const optim::Intent& intent : intents) {
    steps = Hash::mixed(steps, areas_.place_of(intent.parameter));
    steps = Hash::mixed(steps, static_cast<uint64_t>(intent.algorithm));
    steps = Hash::mixed(steps, hash_of(intent.constants));
    if (!model_.is_deferred()) gradients.push_back(intent.parameter.grad());
  }
  const at::Tensor row = at::empty({kColumns}, at::kLong);
  auto* said = row.mutable_data_ptr<int64_t>();
  said[kTrouble] = trouble.empty() ? 0 : 1;
  said[kAction] = static_cast<int64_t>(mine.action);
  said[kMaxNorm] = std::bit_cast<int64_t>(mine.max_norm);
  said[kNormType] = std::bit_cast<int64_t>(mine.norm_type);
  said[kSteps] = static_cast<int64_t>(steps);
  said[kGradients] = static_cast<int64_t>(sample_of(gradients));
  said[kParameters] = static_cast<int64_t>(sample_of_parameters(areas_));
  return group_.all_gather(row);
}

ShardedStep::Request ShardedStep::agree(const Request& mine, const std::string& trouble,
                                        const std::vector<optim::Intent>& intents) const {
  const OperationLabel label("what ranks say before an optimizer's step");
  const at::Tensor all = say(mine, trouble, intents);
  if (all.select(1, kTrouble).any().item<bool>()) {
    const auto texts = group_.all_gather_bytes(trouble);
    const auto& first = *std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
    throw Error(ranks_with(texts, first) + ": " + first);
  }
  constexpr auto kFollows = static_cast<int64_t>(Action::kFollow);
  const auto actions = column(all, kAction);
  const auto leader = static_cast<size_t>(
      std::find_if(actions.begin(), actions.end(), [](int64_t one) { return one != kFollows; }) - actions.begin());
  const auto refuse_odd = [&](Column what, bool of_followers, const char* does, const char* advice) {
    std::vector<bool> odd;
    const auto values = column(all, what);
    for (size_t rank = 0; rank < values.size(); ++rank)
      odd.push_back(values[rank] != values[leader] && (of_followers || actions[rank] != kFollows));
    if (std::find(odd.begin(), odd.end(), true) == odd.end()) return;
    throw Error("ZeroRedundancyOptimizer: " + rank_names(odd) + does + " than rank " + std::to_string(leader) + advice);
  };
  constexpr const char* kSameCalls =
      "; every rank must call clip_grad_norm() and step() in the same order, with the same arguments";
  refuse_odd(kAction, false, " has called another of clip_grad_norm() and step()", kSameCalls);
  for (const Column what : {kMaxNorm, kNormType})
    refuse_odd(what, false, " has called clip_grad_norm() with other arguments", kSameCalls);
  const Request agreed{static_cast<Action>(actions[leader]), std::bit_cast<double>(column(all, kMaxNorm)[leader]),
                       std::bit_cast<double>(column(all, kNormType)[leader])};
  refuse_odd(kParameters, true, " has other parameters", kOtherParameters);
  if (agreed.action != Action::kStep) return agreed;
  refuse_odd(kSteps, true, " would step other parameters",
             ", at another rate or from another state; set options and load states on every rank, take no gradients "
             "away on some, and let learning rates follow in JoinOptions::shadow where a rank has run out of inputs");
  refuse_odd(
      kGradients, true, " has other gradients",
      ", so they were not reduced over all ranks or changed since; steps with gradients of one's own (post-local "
      "SGD) need an optimizer on each rank, made from the parameters");
  return agreed;
}

}  // namespace lockstep::detail
