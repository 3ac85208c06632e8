#include "fully_sharded/scaled_parts.h"

#include <algorithm>

#include "fully_sharded/part_gradients.h"

namespace lockstep::fully_sharded {

ScaledParts::ScaledParts(const Group& group, std::deque<Unit>& units)
    : group_(group),
      accepting_({.accept =
                      [this, &units](const TensorSet& parameters) {
                        record_.unscaled(parts_, parameters);
                        mark_gradients(units);
                      },
                  .know = [this](const TensorSet& parameters) { return known(parameters); },
                  .changed = [](const TensorSet& /*parameters*/) { return false; },
                  .waits = [this](const ScaledPasses& scaled) { return record_.still_scaled_by(scaled, parts_); },
                  .stepped =
                      [this] {
                        const auto stepped = record_.stepped_beside(parts_);
                        return stepped ? names_[*stepped] : std::string();
                      }}) {
  for (const Unit& unit : units)
    for (const Unit::Parameter& parameter : unit.parameters()) {
      parts_.push_back(parameter.part);
      leaves_.push_back(parameter.tensor.unsafeGetTensorImpl());
      names_.push_back(parameter.name);
    }
}

std::optional<KnownGradients> ScaledParts::known(const TensorSet& parameters) const {
  const auto first = std::find_if(parts_.begin(), parts_.end(), [&](const at::Tensor& part) {
    return parameters.contains(part.unsafeGetTensorImpl());
  });
  if (first == parts_.end()) return std::nullopt;
  KnownGradients known{.passes = record_.passes(parts_, parameters), .edits = record_.edits(parts_, parameters)};
  // Each rank has other parts, some of them empty; step() compares which have gradients.
  known.edits.any = known.edits.cleared_here = false;
  if (known.edits.changed) known.edits.changed_name = names_[*known.edits.changed];
  if (known.edits.stepped) known.edits.stepped_name = names_[*known.edits.stepped];
  const auto index = static_cast<size_t>(first - parts_.begin());
  known.identity = Hash::mixed(1, index);
  known.first_name = names_[index];
  for (size_t i = 0; i < parts_.size(); ++i)
    if (parameters.contains(parts_[i].unsafeGetTensorImpl())) known.leaves.insert(leaves_[i]);
  if (group_.world_size() > 1) known.ranks = group_;
  known.contributed = !known.passes.empty();
  return known;
}

void ScaledParts::backward_begins() {
  record_.forget_cleared(parts_);
  record_.begin(parts_);
}

void ScaledParts::backward_ended(int number) {
  for (size_t i = 0; i < parts_.size(); ++i)
    if (parts_[i].grad().defined()) record_.reached(i);
  record_.end(number);
  record_.mark(parts_);
}

std::string ScaledParts::trouble_before(const std::string& call) const {
  if (!record_.still_scaled(parts_, nullptr)) return "";
  return "FullyShardedDataParallel: " + call +
         " was called while the gradients still have the scale of a GradScaler; call scaler.unscale(optimizer) before "
         "you limit gradients, and scaler.step(optimizer), which divides them first, in place of optimizer.step()";
}

}  // namespace lockstep::fully_sharded
