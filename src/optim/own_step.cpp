#include "optim/own_step.h"

#include <utility>

#include <ATen/ATen.h>

#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {

at::Tensor flat_part(const at::Tensor& tensor, const at::Tensor& parameter, int64_t begin, int64_t count) {
  return optim::laid_out(tensor, tensor.scalar_type(), parameter)
      .as_strided({parameter.numel()}, {1})
      .narrow(0, begin, count);
}

/// While it lives, the groups of an optimizer hold slices.
class OwnStep::Exchanged {
 public:
  Exchanged(torch::optim::Optimizer& optimizer, const OwnStep& step) : optimizer_(optimizer) {
    for (auto& group : optimizer.param_groups()) {
      std::vector<at::Tensor> slices;
      for (const at::Tensor& tensor : group.params()) {
        const Slice& slice = step.slices_[step.areas_.place_of(tensor)];
        // An empty slice shows what is remembered of a parameter. Who may do anything with it gets none.
        if (slice.is_stepped && (step.kind_ || slice.tensor.numel() > 0)) slices.push_back(slice.tensor);
      }
      whole_.push_back(std::exchange(group.params(), std::move(slices)));
    }
  }
  ~Exchanged() {
    for (size_t i = 0; i < whole_.size(); ++i) {
      for (at::Tensor& slice : optimizer_.param_groups()[i].params()) slice.mutable_grad().reset();
      optimizer_.param_groups()[i].params() = std::move(whole_[i]);
    }
  }
  Exchanged(const Exchanged&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> whole_;
};

OwnStep::OwnStep(Areas& areas, std::optional<OptimizerKind> kind) : areas_(areas), kind_(std::move(kind)) {
  for (const Areas::Parameter& parameter : areas_.parameters())
    slices_.push_back({.tensor = areas_.mine(areas_.area_of(parameter).parameters, parameter)});
}

void OwnStep::bring_state(torch::optim::Optimizer& optimizer, size_t place) {
  const Areas::Parameter& parameter = areas_.parameters()[place];
  const auto found = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  auto state = found->second->clone();
  for (const OptimizerField& field : kind_->fields) {
    if (field.is_scalar) continue;
    const at::Tensor held = field.get(*state);
    if (!held.defined()) continue;
    const at::Tensor mine = areas_.mine(areas_.array(parameter, field.name, held.scalar_type()), parameter);
    // Loaded, or the optimizer's constructor has made it: this rank brings its slice, which is all that it will read.
    if (!held.is_alias_of(mine)) mine.copy_(flat_part(held, parameter.tensor, parameter.begin, mine.numel()));
    field.set(*state, mine);
  }
  optimizer.state()[slices_[place].tensor.unsafeGetTensorImpl()] = std::move(state);
}

void OwnStep::take_state(torch::optim::Optimizer& optimizer, size_t place) {
  const Areas::Parameter& parameter = areas_.parameters()[place];
  const auto found = optimizer.state().find(slices_[place].tensor.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  auto state = std::move(found->second);
  optimizer.state().erase(found);
  for (const OptimizerField& field : kind_->fields) {
    if (field.is_scalar) continue;
    const at::Tensor held = field.get(*state);
    if (!held.defined()) continue;
    const at::Tensor& array = areas_.array(parameter, field.name, held.scalar_type());
    const at::Tensor mine = areas_.mine(array, parameter);
    if (!held.is_alias_of(mine)) mine.copy_(held);
    field.set(*state, areas_.on_device() ? mine : Areas::view(array, parameter));
  }
  optimizer.state()[parameter.tensor.unsafeGetTensorImpl()] = std::move(state);
}

void OwnStep::run(torch::optim::Optimizer& optimizer, const GradientOf& gradient_of,
                  const std::function<void()>& own_step) {
  // Whole tensors of parameters that are not stepped would stay.
  const bool was_complete = std::exchange(is_complete_, false);
  const auto changes = [&](const Slice& slice) { return kind_ && (slice.is_stepped || was_complete); };
  for (size_t place = 0; place < slices_.size(); ++place) {
    Slice& slice = slices_[place];
    slice.tensor.mutable_grad() = gradient_of(areas_.parameters()[place]);
    slice.is_stepped = slice.tensor.grad().defined();
    if (changes(slice)) bring_state(optimizer, place);
  }
  {
    const Exchanged exchanged(optimizer, *this);
    own_step();
  }
  for (size_t place = 0; place < slices_.size(); ++place)
    if (changes(slices_[place])) take_state(optimizer, place);
}

void OwnStep::complete(torch::optim::Optimizer& optimizer) {
  if (!areas_.on_device()) return areas_.complete();
  if (!kind_ || is_complete_) return;
  const OperationLabel label("the state of a ZeroRedundancyOptimizer, to be saved");
  for (const Areas::Area& area : areas_.areas())
    for (const auto& [name, array] : area.arrays) {
      const at::Tensor whole = areas_.whole(array, area);
      for (const Areas::Parameter& parameter : areas_.parameters()) {
        const auto found = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
        if (&areas_.area_of(parameter) != &area || found == optimizer.state().end()) continue;
        for (const OptimizerField& field : kind_->fields) {
          if (field.is_scalar || field.name != name) continue;
          const at::Tensor held = field.get(*found->second);
          // What was loaded since the last step is whole.
          if (held.defined() && held.is_alias_of(array)) field.set(*found->second, Areas::view(whole, parameter));
        }
      }
    }
  is_complete_ = true;
}

}  // namespace lockstep::detail
