#include <algorithm>
#include <bit>
#include <cstring>

#include <ATen/ATen.h>
#include <torch/serialize/output-archive.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/rank_names.h"
#include "optim/common_trouble.h"
#include "optim/slice_step.h"
#include "rank_page/operation_label.h"

// What ranks tell each other before each steps its slice, so that they do the same or none of them does anything.

namespace lockstep::detail {
namespace {

uint64_t mixed_with(uint64_t hash, const c10::IValue& value) {
  if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) hash = mixed_with(hash, item);
    return hash;
  }
  const double number = value.isBool() ? value.toBool() : number_of(value);
  uint64_t word;
  std::memcpy(&word, &number, sizeof word);
  return Hash::mixed(hash, word);
}

/// The ranks whose row differs from rank 0's in a column; empty if none does.
std::string ranks_unlike_rank_zero(const at::Tensor& rows, int64_t column) {
  std::vector<bool> odd;
  for (int64_t rank = 0; rank < rows.size(0); ++rank)
    odd.push_back(rows[rank][column].item<int64_t>() != rows[0][column].item<int64_t>());
  return std::find(odd.begin(), odd.end(), true) == odd.end() ? "" : rank_names(odd);
}

}  // namespace

std::string SliceStep::trouble(const torch::optim::Optimizer& optimizer) const {
  if (model_.is_deferred())
    return "ZeroRedundancyOptimizer: another one that was made from this model takes its gradients; step that one";
  if (model_.join.options != nullptr) return kNoStepWithinJoin;
  return common_trouble(model_, optimizer, areas_);
}

uint64_t SliceStep::hash_of_options(const torch::optim::OptimizerOptions& options, bool all) {
  uint64_t hash = Hash::kStart;
  const auto add = [&](const auto& tell) {
    try {
      tell();
    } catch (const c10::Error&) {  // the class of the options does not implement it
    }
  };
  add([&] { hash = Hash::mixed(hash, std::bit_cast<uint64_t>(options.get_lr())); });
  if (all)
    add([&] {
      torch::serialize::OutputArchive archive;
      options.serialize(archive);
      archive.save_to([&](const void* bytes, size_t size) {
        for (size_t i = 0; i < size; ++i) hash = Hash::mixed(hash, static_cast<const unsigned char*>(bytes)[i]);
        return size;
      });
    });
  return hash;
}

uint64_t SliceStep::hash_of_step(const torch::optim::Optimizer& optimizer) const {
  // Writing options down takes a part of a millisecond.
  constexpr int64_t kAllOptionsEvery = 16;
  uint64_t hash = Hash::kStart;
  for (const auto& group : optimizer.param_groups()) {
    hash = Hash::mixed(hash, group.params().size());
    if (!slices_.kind() && group.has_options())
      hash = Hash::mixed(hash, hash_of_options(group.options(), steps_ % kAllOptionsEvery == 0));
    for (const OptimizerOption& option : slices_.kind() ? slices_.kind()->options : std::vector<OptimizerOption>{})
      hash = mixed_with(hash, option.get(group.options()));
    for (const at::Tensor& tensor : group.params()) {
      if (!tensor.grad().defined()) continue;
      hash = Hash::mixed(hash, areas_.place_of(tensor));
      const auto found = optimizer.state().find(tensor.unsafeGetTensorImpl());
      if (!slices_.kind() || found == optimizer.state().end()) continue;
      for (const OptimizerField& field : slices_.kind()->fields) {
        const at::Tensor value = field.get(*found->second);
        hash = field.is_scalar ? mixed_with(hash, value) : Hash::mixed(hash, value.defined() ? 1 : 0);
      }
    }
  }
  return hash;
}

void SliceStep::agree(const std::string& trouble, const torch::optim::Optimizer& optimizer) const {
  const OperationLabel label("what ranks say before an optimizer's step");
  std::vector<at::Tensor> gradients;
  for (const Areas::Parameter& parameter : areas_.parameters())
    if (trouble.empty() && parameter.tensor.grad().defined()) gradients.push_back(parameter.tensor.grad());
  const at::Tensor mine = at::empty({4}, at::kLong);
  auto* said = mine.mutable_data_ptr<int64_t>();
  said[0] = trouble.empty() ? 0 : 1;
  said[1] = static_cast<int64_t>(trouble.empty() ? hash_of_step(optimizer) : 0);
  said[2] = static_cast<int64_t>(sample_of(gradients));
  said[3] = static_cast<int64_t>(sample_of_parameters(areas_));
  const at::Tensor all = group_.all_gather(mine);
  if (all.select(1, 0).any().item<bool>()) {
    const auto texts = group_.all_gather_bytes(trouble);
    const auto& first = *std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
    throw Error(ranks_with(texts, first) + ": " + first);
  }
  if (const std::string odd = ranks_unlike_rank_zero(all, 3); !odd.empty())
    throw Error("ZeroRedundancyOptimizer: " + odd + " has other parameters than rank 0" + kOtherParameters);
  if (const std::string odd = ranks_unlike_rank_zero(all, 1); !odd.empty())
    throw Error("ZeroRedundancyOptimizer: " + odd +
                " would step other parameters than rank 0, at another rate or from another state; set options and load "
                "states on every rank, and take no gradients away on some");
  if (const std::string odd = ranks_unlike_rank_zero(all, 2); !odd.empty())
    throw Error(
        "ZeroRedundancyOptimizer: " + odd +
        " has other gradients than rank 0, so they were not reduced over all ranks or changed since; steps with "
        "gradients of one's own (post-local SGD) need an optimizer on each rank, made from the parameters");
}

}  // namespace lockstep::detail
