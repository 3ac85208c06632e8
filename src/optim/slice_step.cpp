#include "optim/slice_step.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/shm/kernels/stream_copy.h"
#include "optim/common_trouble.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {

SliceStep::SliceStep(const Replica& model, torch::optim::Optimizer& optimizer, bool state_is_known,
                     const ZeroRedundancyOptions& options)
    : model_(state_of(model)),
      model_is_there_(model_.alive),
      group_(model_.group),
      optimizer_(&optimizer),
      areas_(model_, optimizer, options, typeid(optimizer).name()),
      slices_(areas_, state_is_known ? std::optional(kind_of(optimizer)) : std::nullopt),
      watch_(areas_, options.shared_parameters) {
  // Another step may have the gradients; then this one only says so.
  if (options.shared_parameters && model_.deferral.owner == nullptr)
    model_.defer({.owner = this, .backward_begins = [this](bool awaits) { watch_.backward_begins(awaits); }});
}

SliceStep::~SliceStep() {
  if (!model_is_there_.expired() && model_.deferral.owner == this) model_.defer({});
}

void SliceStep::step(const std::function<void()>& own_step) {
  const at::NoGradGuard no_grad;
  const std::unique_lock alone(stepping_, std::try_to_lock);
  TORCH_CHECK(alone.owns_lock(), kTwoThreads);
  TORCH_CHECK(!model_is_there_.expired(), kModelIsGone);
  const Reducer::Stepping here(*model_.reducer);
  watch_.stepped();
  agree(trouble(*optimizer_), *optimizer_);
  ++steps_;
  model_.check_before_step();
  areas_.forget_others();
  const auto gradient_of = [](const Areas::Parameter& parameter) {
    const at::Tensor& gradient = parameter.tensor.grad();
    return gradient.defined() ? flat_part(gradient.to(parameter.tensor.scalar_type()), parameter.tensor,
                                          parameter.begin, parameter.end - parameter.begin)
                              : at::Tensor();
  };
  slices_.run(*optimizer_, gradient_of, own_step);
  spread();
  for (const Areas::Parameter& parameter : areas_.parameters())
    if (slices_.is_stepped(parameter)) parameter.tensor.unsafeGetTensorImpl()->bump_version();
}

void SliceStep::spread() const {
  const auto is_stepped = [&](const Areas::Parameter& parameter) { return slices_.is_stepped(parameter); };
  if (areas_.memory() == nullptr) return areas_.gather_parameters(is_stepped);
  for (const Areas::Parameter& parameter : areas_.parameters()) {
    if (!is_stepped(parameter)) continue;
    const at::Tensor slice = areas_.mine(areas_.area_of(parameter).parameters, parameter);
    const size_t at = static_cast<size_t>(parameter.offset + parameter.begin) * slice.element_size();
    for (std::byte* other : areas_.area_of(parameter).others)
      shm::stream_copy(other + at, static_cast<const std::byte*>(slice.const_data_ptr()), slice.nbytes());
  }
  const OperationLabel label("the end of an optimizer's step");
  group_.barrier();
}

void SliceStep::check_state_is_known() const {
  TORCH_CHECK(slices_.kind().has_value(),
              "ZeroRedundancyOptimizer: what this optimizer remembers belongs to the slices of each rank, and only its "
              "class knows what it is; it can be neither saved nor loaded. Save SGD, Adam, AdamW, RMSprop or Adagrad, "
              "or let each rank step its own copy with an optimizer made from the parameters");
}

void SliceStep::complete() {
  check_state_is_known();
  slices_.complete(*optimizer_);
}

void DeleteSliceStep::operator()(SliceStep* step) const { delete step; }

SliceStepPtr step_by_slices(const Replica& model, torch::optim::Optimizer& optimizer, FormulaKind kind,
                            bool state_is_known, const ZeroRedundancyOptions& options) {
  if (state_of(model).group.world_size() == 1 || kind != FormulaKind::kNone) return nullptr;
  const std::string problem = optim::problem_of(optimizer);
  TORCH_CHECK(problem.empty(), problem);
  return SliceStepPtr(new SliceStep(model, optimizer, state_is_known, options));
}

void step(SliceStep& slices, const std::function<void()>& own_step) { slices.step(own_step); }
void check_state_is_known(const SliceStep& slices) { slices.check_state_is_known(); }
void complete_state(SliceStep& slices) { slices.complete(); }
const Group* slice_holders(const SliceStep& slices) { return slices.slice_holders(); }
void move_to(SliceStep& slices, torch::optim::Optimizer& optimizer) { slices.move_to(optimizer); }

}  // namespace lockstep::detail
