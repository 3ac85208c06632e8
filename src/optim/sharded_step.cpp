#include "optim/sharded_step.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "checkpoint/master_state.h"
#include "checkpoint/optimizer_kind.h"
#include "optim/common_trouble.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {

namespace {

bool all_have_inputs(const std::vector<Facts>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [](const Facts& facts) { return facts.active; });
}

}  // namespace

ShardedStep::ShardedStep(const Replica& model, torch::optim::Optimizer& optimizer, FormulaKind kind,
                         ZeroRedundancyOptions options, StepOfItself own_step)
    : model_(state_of(model)),
      model_is_there_(model_.alive),
      formula_(formula_of(kind)),
      options_(options),
      group_(model_.group),
      own_step_(own_step),
      optimizer_(&optimizer),
      areas_(model_, optimizer, options, std::to_string(static_cast<int>(kind))),
      gradients_(model_, areas_),
      watch_(areas_, options.shared_parameters) {
  TORCH_INTERNAL_ASSERT(!areas_.on_device() || own_step_ != nullptr);
  if (areas_.on_device()) own_.emplace(areas_, kind_of(optimizer));
  model_.set_shared_step(this);
}

ShardedStep::~ShardedStep() {
  if (!model_is_there_.expired() && model_.shared_step == this) model_.set_shared_step(nullptr);
}

void ShardedStep::check_model() const {
  TORCH_CHECK(!model_is_there_.expired(), kModelIsGone);
}

at::Tensor ShardedStep::adopt(const std::string& name, const Areas::Parameter& parameter, const at::Tensor& held,
                              at::ScalarType dtype) {
  const at::Tensor& array = areas_.array(parameter, name, dtype);
  if (held.defined() && held.is_alias_of(array)) return held;
  // New, or loaded: this rank brings its slice, which is all that it will read.
  if (const int64_t begin = parameter.begin, count = parameter.end - begin; count > 0) {
    const at::Tensor mine = areas_.mine(array, parameter);
    if (held.defined())
      mine.copy_(optim::laid_out(held, dtype, parameter.tensor)
                     .as_strided({parameter.tensor.numel()}, {1})
                     .narrow(0, begin, count));
    else
      mine.zero_();
  }
  return Areas::view(array, parameter);
}

optim::Plan ShardedStep::plan(torch::optim::Optimizer& optimizer, const optim::Intent& intent) {
  const Areas::Parameter& parameter = areas_.parameter_of(intent.parameter);
  const Areas::Area& area = areas_.area_of(parameter);
  const bool masters = has_masters(area.dtype);
  const at::ScalarType dtype = masters ? at::kFloat : area.dtype;
  optim::Plan result = optim::plan_of(
      intent,
      model_.is_deferred() ? gradients_.source(*gradients_.index_of(parameter.tensor)) : optim::own_gradient(intent),
      masters);
  result.begin = parameter.begin;
  result.end = parameter.end;
  for (std::byte* other : area.others)
    result.copies.push_back(other + static_cast<size_t>(parameter.offset) * result.element);
  const int arrays = optim::state_arrays(intent.algorithm);
  if (arrays == 0 && !masters) return result;
  auto& state = optim::state_of(optimizer, intent.parameter, formula_, masters);
  for (int a = 0; a < arrays; ++a) {
    const at::Tensor array = adopt(std::to_string(a), parameter, formula_.array(state, a), dtype);
    formula_.set_array(state, a, array);
    result.arrays[static_cast<size_t>(a)] = static_cast<std::byte*>(array.mutable_data_ptr());
  }
  if (masters) {
    at::Tensor& master = dynamic_cast<Master&>(state).master_param;
    master = adopt("master", parameter, master, at::kFloat);
    result.master = static_cast<std::byte*>(master.mutable_data_ptr());
  }
  formula_.count(state);
  return result;
}

std::vector<optim::Intent> ShardedStep::intents() const {
  if (!model_.is_deferred()) return optim::intents_of(*optimizer_, formula_);
  return optim::intents_of(*optimizer_, formula_, [&](const at::Tensor& parameter) {
    const auto index = gradients_.index_of(parameter);
    return index && gradients_.is_used(*index);  // refresh() may have found one that is frozen
  });
}

void ShardedStep::step_by_kernels(const std::vector<optim::Intent>& intents) {
  areas_.forget_others();
  std::vector<optim::Plan> plans;
  for (const optim::Intent& intent : intents) plans.push_back(plan(*optimizer_, intent));
  bytes_moved_ += optim::run(plans);
}

void ShardedStep::step_by_itself(const Stepped& stepped) {
  const auto gradient_of = [&](const Areas::Parameter& parameter) {
    const at::Tensor& tensor = parameter.tensor;
    if (!stepped.contains(tensor.unsafeGetTensorImpl())) return at::Tensor();
    if (model_.is_deferred()) return gradients_.slice_of(*gradients_.index_of(tensor));
    return flat_part(tensor.grad().to(tensor.scalar_type()), tensor, parameter.begin, parameter.end - parameter.begin);
  };
  own_->run(*optimizer_, gradient_of, [this] { own_step_(*optimizer_); });
}

void ShardedStep::take(const std::vector<optim::Intent>& intents) {
  const bool deferred = model_.is_deferred();
  if (!deferred || !gradients_.settlement().is_void) {
    if (deferred) gradients_.collect();
    Stepped stepped;
    for (const optim::Intent& intent : intents) stepped.insert(intent.parameter.unsafeGetTensorImpl());
    own_ ? step_by_itself(stepped) : step_by_kernels(intents);
    areas_.gather_parameters(
        [&](const Areas::Parameter& parameter) { return stepped.contains(parameter.tensor.unsafeGetTensorImpl()); });
    for (const optim::Intent& intent : intents) intent.parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (deferred) return gradients_.conclude();
  if (areas_.memory() == nullptr) return;
  const OperationLabel label("the end of an optimizer's step");
  group_.barrier();
}

void ShardedStep::step() {
  const at::NoGradGuard no_grad;
  const std::unique_lock alone(stepping_, std::try_to_lock);
  TORCH_CHECK(alone.owns_lock(), kTwoThreads);
  check_model();
  if (model_.join.shadowing && model_.is_deferred()) return;  // it has followed the others
  const Reducer::Stepping here(*model_.reducer);
  watch_.stepped();
  const std::string problem = trouble(*optimizer_);
  if (model_.is_deferred()) gradients_.settle(Reducer::Share::kGradients);
  const auto what = problem.empty() ? intents() : std::vector<optim::Intent>{};
  agree({.action = Action::kStep}, problem, what);
  if (!model_.is_deferred() || all_have_inputs(gradients_.settlement().ranks)) model_.check_before_step();
  take(what);
}

void ShardedStep::backward_begins(bool gradients_wait) {
  if (takes_sum() || options_.shared_parameters) watch_.backward_begins(gradients_wait);
}

std::vector<Facts> ShardedStep::step_without_inputs() {
  const at::NoGradGuard no_grad;
  watch_.stepped();
  const std::string problem = trouble(*optimizer_);
  const auto ranks = gradients_.settle(Reducer::Share::kOutOfInputs).ranks;
  if (std::none_of(ranks.begin(), ranks.end(), [](const Facts& facts) { return facts.active; })) {
    gradients_.conclude();
    return ranks;
  }
  for (;;) {
    const auto what = problem.empty() ? intents() : std::vector<optim::Intent>{};
    const Request request = agree({.action = Action::kFollow}, problem, what);
    if (request.action == Action::kStep) {
      take(what);
      return ranks;
    }
    clip(request);
  }
}

double ShardedStep::clip_grad_norm(double max_norm, double type) {
  const at::NoGradGuard no_grad;
  if (model_.join.shadowing) return norm_;
  const std::string problem = trouble(*optimizer_);
  gradients_.settle(Reducer::Share::kGradients);
  clip(agree({Action::kClip, max_norm, type}, problem, {}));
  return norm_;
}

void ShardedStep::clip(const Request& request) {
  norm_ = 0;
  if (gradients_.settlement().is_void) return;
  gradients_.collect();
  norm_ = gradients_.norm(request.norm_type);
  const double factor = request.max_norm / (norm_ + 1e-6);
  if (std::isnan(factor) || factor < 1) gradients_.multiply(factor);
}

void DeleteShardedStep::operator()(ShardedStep* step) const { delete step; }

ShardedStepPtr shard(const Replica& model, torch::optim::Optimizer& optimizer, FormulaKind kind,
                     const ZeroRedundancyOptions& options, StepOfItself own_step) {
  if (state_of(model).group.world_size() == 1) return nullptr;
  return ShardedStepPtr(new ShardedStep(model, optimizer, kind, options, own_step));
}

void step(ShardedStep& sharded) { sharded.step(); }
void complete_state(ShardedStep& sharded) { sharded.complete(); }
const Group* slice_holders(const ShardedStep& sharded) { return sharded.slice_holders(); }
void move_to(ShardedStep& sharded, torch::optim::Optimizer& optimizer) { sharded.move_to(optimizer); }

std::vector<at::Tensor> trained_parameters(const Replica& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state_of(model).attached.trained()) tensors.push_back(tensor);
  return tensors;
}

}  // namespace lockstep::detail
