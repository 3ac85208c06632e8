#include "fully_sharded/part_gradients.h"

#include <ATen/ATen.h>

#include "reducer/gradient_marks.h"

namespace lockstep::fully_sharded {

void mark_gradients(std::deque<Unit>& units) {
  for (Unit& unit : units)
    for (Unit::Parameter& parameter : unit.parameters()) {
      const at::Tensor& gradient = parameter.part.grad();
      parameter.has_gradient_mark = gradient.defined();
      if (gradient.defined()) parameter.gradient_mark = mark_of(gradient);
    }
}

GradientChanges changes_of_gradients(const std::deque<Unit>& units) {
  GradientChanges changes;
  std::string first_zeroed;
  for (const Unit& unit : units)
    for (const Unit::Parameter& parameter : unit.parameters()) {
      const at::Tensor& gradient = parameter.part.grad();
      if (!parameter.has_gradient_mark || !gradient.defined() || gradient.numel() == 0) continue;
      if (gradient.is_cpu() && gradient.layout() == at::kStrided && parameter.gradient_mark == mark_of(gradient))
        changes.kept = true;
      else if (gradient.layout() == at::kStrided && gradient.count_nonzero().item<int64_t>() == 0)
        changes.zeroed = true, first_zeroed = first_zeroed.empty() ? parameter.name : first_zeroed;
      else if (changes.changed.empty())
        changes.changed = parameter.name;
    }
  if (changes.changed.empty() && changes.zeroed && changes.kept) changes.changed = first_zeroed;
  return changes;
}

}  // namespace lockstep::fully_sharded
