#include "optim/slice_step.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/shm/stream_copy.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

/// [begin, begin + count) of a tensor's elements in the order in which `parameter` lies in memory.
at::Tensor flat_part(const at::Tensor& tensor, const at::Tensor& parameter, int64_t begin, int64_t count) {
  return optim::laid_out(tensor, tensor.scalar_type(), parameter)
      .as_strided({parameter.numel()}, {1})
      .narrow(0, begin, count);
}

}  // namespace

/// While it lives, the groups of an optimizer hold slices.
class SliceStep::Exchanged {
 public:
  Exchanged(torch::optim::Optimizer& optimizer, const SliceStep& step) : optimizer_(optimizer) {
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

SliceStep::SliceStep(const Replica& model, const torch::optim::Optimizer& optimizer, bool state_is_known,
                     const ZeroRedundancyOptions& options)
    : model_(state_of(model)),
      group_(model_.group),
      kind_(state_is_known ? std::optional(kind_of(optimizer)) : std::nullopt),
      areas_(model_, optimizer, options, typeid(optimizer).name()) {
  for (const Areas::Parameter& parameter : areas_.parameters())
    slices_.push_back({.tensor = Areas::mine(areas_.area_of(parameter).parameters, parameter)});
}

void SliceStep::bring_gradient(size_t place) {
  const Areas::Parameter& parameter = areas_.parameters()[place];
  Slice& slice = slices_[place];
  const at::Tensor& gradient = parameter.tensor.grad();
  slice.is_stepped = gradient.defined();
  if (slice.is_stepped)
    slice.tensor.mutable_grad() =
        flat_part(gradient.to(parameter.tensor.scalar_type()), parameter.tensor, parameter.begin, slice.tensor.numel());
}

void SliceStep::bring_state(torch::optim::Optimizer& optimizer, size_t place) {
  const Areas::Parameter& parameter = areas_.parameters()[place];
  const auto found = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  auto state = found->second->clone();
  for (const OptimizerField& field : kind_->fields) {
    if (field.is_scalar) continue;
    const at::Tensor held = field.get(*state);
    if (!held.defined()) continue;
    const at::Tensor mine = Areas::mine(areas_.array(parameter, field.name, held.scalar_type()), parameter);
    // Loaded, or the optimizer's constructor has made it: this rank brings its slice, which is all that it will read.
    if (!held.is_alias_of(mine)) mine.copy_(flat_part(held, parameter.tensor, parameter.begin, mine.numel()));
    field.set(*state, mine);
  }
  optimizer.state()[slices_[place].tensor.unsafeGetTensorImpl()] = std::move(state);
}

void SliceStep::take_state(torch::optim::Optimizer& optimizer, size_t place) {
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
    const at::Tensor mine = Areas::mine(array, parameter);
    if (!held.is_alias_of(mine)) mine.copy_(held);
    field.set(*state, Areas::view(array, parameter));
  }
  optimizer.state()[parameter.tensor.unsafeGetTensorImpl()] = std::move(state);
}

void SliceStep::step(torch::optim::Optimizer& optimizer, const std::function<void()>& own_step) {
  const at::NoGradGuard no_grad;
  agree(trouble(optimizer), optimizer);
  areas_.forget_others();
  for (size_t place = 0; place < slices_.size(); ++place) {
    bring_gradient(place);
    if (slices_[place].is_stepped && kind_) bring_state(optimizer, place);
  }
  {
    const Exchanged exchanged(optimizer, *this);
    own_step();
  }
  for (size_t place = 0; place < slices_.size(); ++place)
    if (slices_[place].is_stepped && kind_) take_state(optimizer, place);
  spread();
  for (size_t place = 0; place < slices_.size(); ++place)
    if (slices_[place].is_stepped) areas_.parameters()[place].tensor.unsafeGetTensorImpl()->bump_version();
}

void SliceStep::spread() const {
  const auto is_stepped = [&](const Areas::Parameter& parameter) {
    return slices_[areas_.place_of(parameter.tensor)].is_stepped;
  };
  if (areas_.memory() == nullptr) return areas_.gather_parameters(is_stepped);
  for (const Areas::Parameter& parameter : areas_.parameters()) {
    if (!is_stepped(parameter)) continue;
    const at::Tensor slice = Areas::mine(areas_.area_of(parameter).parameters, parameter);
    const size_t at = static_cast<size_t>(parameter.offset + parameter.begin) * slice.element_size();
    for (std::byte* other : areas_.area_of(parameter).others)
      shm::stream_copy(other + at, static_cast<const std::byte*>(slice.const_data_ptr()), slice.nbytes());
  }
  const OperationLabel label("the end of an optimizer's step");
  group_.barrier();
}

void SliceStep::check_state_is_known() const {
  TORCH_CHECK(kind_.has_value(),
              "ZeroRedundancyOptimizer: what this optimizer remembers belongs to the slices of each rank, and only its "
              "class knows what it is; it can be neither saved nor loaded. Save SGD, Adam, AdamW, RMSprop or Adagrad, "
              "or let each rank step its own copy with an optimizer made from the parameters");
}

void SliceStep::complete() {
  check_state_is_known();
  areas_.complete();
}

void DeleteSliceStep::operator()(SliceStep* step) const { delete step; }

SliceStepPtr step_by_slices(const Replica& model, const torch::optim::Optimizer& optimizer, FormulaKind kind,
                            bool state_is_known, const ZeroRedundancyOptions& options) {
  if (state_of(model).group.world_size() == 1 || kind != FormulaKind::kNone) return nullptr;
  const std::string problem = optim::problem_of(optimizer);
  TORCH_CHECK(problem.empty(), problem);
  return SliceStepPtr(new SliceStep(model, optimizer, state_is_known, options));
}

void step(SliceStep& slices, torch::optim::Optimizer& optimizer, const std::function<void()>& own_step) {
  slices.step(optimizer, own_step);
}
void check_state_is_known(const SliceStep& slices) { slices.check_state_is_known(); }
void complete_state(SliceStep& slices) { slices.complete(); }
const Group* slice_holders(const SliceStep& slices) { return slices.slice_holders(); }

}  // namespace lockstep::detail
