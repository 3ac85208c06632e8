#include "reducer/gradient_changes.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "base/rank_names.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_marks.h"

namespace lockstep {

void GradientChanges::remember() {
  marks_.assign(plan_.places.size(), 0);
  for (size_t i = 0; i < marks_.size() && plan_.has_buckets(); ++i)
    if (buckets_.slot_of(i).is_current()) marks_[i] = mark_of(plan_.tensors[i].grad());
}

std::string GradientChanges::found_in(size_t parameter) const {
  constexpr const char* kAdvice =
      " was changed between backward and the step of the ZeroRedundancyOptimizer. At that point .grad is this rank's "
      "own gradient, and the mean of gradients that each rank has clipped or scaled is not the clipped mean; limit the "
      "norm by model.clip_grad_norm() on every rank, or scale the loss";
  const GradientSlot& slot = buckets_.slot_of(parameter);
  const at::Tensor& gradient = plan_.tensors[parameter].grad();
  if (!gradient.defined()) return "";  // see dropped()
  const uint64_t now = slot.is_current() ? mark_of(gradient) : 0;
  const bool is_changed = now != marks_[parameter] && slot.problem() == nullptr;
  return is_changed ? ".grad of parameter " + plan_.names[parameter] + kAdvice : "";
}

std::string GradientChanges::found() const {
  std::string change;
  for (size_t i = 0; i < marks_.size() && plan_.has_buckets() && change.empty(); ++i) change = found_in(i);
  return change;
}

std::string GradientChanges::found_between_passes() const {
  for (size_t i = 0; i < marks_.size() && plan_.has_buckets(); ++i) {
    const std::string change = found_in(i);
    if (!change.empty() && plan_.tensors[i].grad().any().item<bool>()) return change;  // zeros: an abandoned step
  }
  return "";
}

std::vector<bool> GradientChanges::dropped() const {
  std::vector<bool> dropped(plan_.tensors.size());
  for (size_t i = 0; i < marks_.size(); ++i) dropped[i] = marks_[i] != 0 && !plan_.tensors[i].grad().defined();
  return dropped;
}

void GradientChanges::check_dropped(const std::vector<float>& totals, const std::vector<bool>& dropped) const {
  const auto differs = [](float total) { return total >= kOneDropped && std::fmod(total, kOneDropped) > 0; };
  const auto first = std::find_if(totals.begin(), totals.end(), differs);
  if (first == totals.end()) return;
  const OperationLabel label("which gradients were dropped on each rank");
  const auto index = static_cast<size_t>(first - totals.begin());
  const auto told = plan_.group.all_gather_bytes(dropped[index] ? "dropped" : "");
  throw Error("the gradient of parameter " + plan_.names[index] + " was dropped on " +
              ranks_with(told, std::string("dropped")) +
              " between backward and the step of the ZeroRedundancyOptimizer, but not on every rank, so the mean would "
              "count it as zeros there. Call zero_grad() after step(), or before backward, on every rank; a rank that "
              "has nothing to contribute calls skip_step() in place of its backward");
}

}  // namespace lockstep
