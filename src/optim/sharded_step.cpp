#include "optim/sharded_step.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <typeinfo>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include "base/state_in_use.h"
#include "checkpoint/optimizer_kind.h"
#include "collectives/storages.h"
#include "optim/common_trouble.h"
#include "optim/kernel_slices.h"
#include "optim/own_slices.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {

namespace {

bool all_have_inputs(const std::vector<Facts>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(), [](const Facts& facts) { return facts.active; });
}

/// Leaves the trouble for parameters that are wrong and lie in their own memory again.
std::shared_ptr<const SharedWeights> leave_trouble_of(const Areas& areas, const std::string& trouble) {
  std::vector<at::Tensor> tensors;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> kept;
  for (const Areas::Parameter& parameter : areas.parameters()) {
    tensors.push_back(parameter.tensor);
    kept.push_back(parameter.tensor.storage().getWeakStorageImpl());
  }
  return leave_trouble(storages_of(tensors), trouble, [kept = std::move(kept)] {
    return std::any_of(kept.begin(), kept.end(), [](const auto& storage) { return !storage.expired(); });
  });
}

std::unique_ptr<SliceStepper> make_slices(Areas& areas, const torch::optim::Optimizer& optimizer, const StepKind& kind,
                                          const ZeroRedundancyOptions& options) {
  if (kind.formula != FormulaKind::kNone && !areas.on_device())
    return std::make_unique<KernelSlices>(areas, formula_of(kind.formula), options.master_weights);
  return std::make_unique<OwnSlices>(areas, kind.state_is_known ? std::optional(kind_of(optimizer)) : std::nullopt,
                                     kind.own_step);
}

}  // namespace

bool StepGradients::has(const at::Tensor& parameter) const {
  if (!model_.is_deferred()) return parameter.grad().defined();
  const auto index = sum_.index_of(parameter);
  return index && sum_.is_used(*index);
}

optim::GradientSource StepGradients::source(const optim::Intent& intent) const {
  return model_.is_deferred() ? sum_.source(*sum_.index_of(intent.parameter)) : optim::own_gradient(intent);
}

at::Tensor StepGradients::slice_of(const Areas::Parameter& parameter) const {
  const at::Tensor& tensor = parameter.tensor;
  if (!has(tensor)) return {};
  if (model_.is_deferred()) return sum_.slice_of(*sum_.index_of(tensor));
  return flat_part(tensor.grad().to(tensor.scalar_type()), tensor, parameter.begin, parameter.end - parameter.begin);
}

ShardedStep::ShardedStep(const Replica& model, torch::optim::Optimizer& optimizer, const StepKind& kind,
                         const ZeroRedundancyOptions& options)
    : model_(state_of(model)),
      model_is_there_(model_.alive),
      may_take_sum_(kind.formula != FormulaKind::kNone),
      group_(model_.group),
      optimizer_(&optimizer),
      areas_(model_, optimizer, options, c10::demangle(typeid(optimizer).name())),
      sum_(model_, areas_),
      gradients_(model_, sum_),
      slices_(make_slices(areas_, optimizer, kind, options)),
      watch_(areas_),
      copy_watch_(options.shared_parameters ? std::make_unique<SharedCopyWatch>(group_, areas_) : nullptr) {
  // Another step may have the gradients; a step that takes no sums then only says so.
  if (may_take_sum_ || (copy_watch_ && model_.shared_step == nullptr)) model_.set_shared_step(this);
}

void ShardedStep::move_to(torch::optim::Optimizer& optimizer) {
  note_gone(optimizer_);
  optimizer_ = &optimizer;
}

ShardedStep::~ShardedStep() {
  note_gone(optimizer_);
  const bool model_is_there = !model_is_there_.expired();
  if (model_is_there && model_.shared_step == this) model_.set_shared_step(nullptr);
  // Each rank is about to get its own copy of parameters that several ranks may have changed.
  const std::string trouble = copy_watch_ ? copy_watch_->trouble_at_end() : "";
  if (trouble.empty()) return;
  give_back(areas_);
  auto left = leave_trouble_of(areas_, trouble);
  if (model_is_there) model_.attached.leave(std::move(left));
  if (std::uncaught_exceptions() > 0) return;
  try {
    TORCH_WARN("a ZeroRedundancyOptimizer ends, and its ", trouble);
  } catch (const std::exception&) {  // a handler that turns warnings into errors: the next backward reports it
  }
}

void ShardedStep::check_model() const { TORCH_CHECK(!model_is_there_.expired(), kModelIsGone); }

std::string ShardedStep::trouble() const {
  if (may_take_sum_ && model_.shared_step != this)
    return std::string("ZeroRedundancyOptimizer: another one was made from this model after it") +
           (model_.shared_step != nullptr ? "; step that one" : ", and was destroyed; make a new one and step that");
  if (!may_take_sum_ && model_.is_deferred())
    return "ZeroRedundancyOptimizer: another one that was made from this model takes its gradients; step that one";
  if (may_take_sum_ && model_.join.options != nullptr && model_.equipment.hook)
    return "ZeroRedundancyOptimizer::step() within join() with a communication hook: ranks that have run out of inputs "
           "would not call it; remove the hook, or step with the optimizer of each rank, made from the parameters";
  if (model_.join.options != nullptr && !takes_sum()) return kNoStepWithinJoin;
  if (model_.reducer->has_scaled_gradients())
    return "ZeroRedundancyOptimizer::step(): the gradients still have the scale of a GradScaler; call "
           "scaler.step(optimizer), which divides them, in place of optimizer.step()";
  if (std::string changed = copy_watch_ ? copy_watch_->trouble() : ""; !changed.empty()) return changed;
  return common_trouble(model_, *optimizer_, areas_);
}

SliceStepper::Outlook ShardedStep::prepare(const std::string& trouble) {
  return trouble.empty() ? slices_->prepare(*optimizer_, gradients_) : SliceStepper::Outlook{};
}

StepRequest ShardedStep::agree(const StepRequest& mine, const std::string& trouble,
                               const SliceStepper::Outlook& outlook) const {
  std::vector<at::Tensor> reduced;
  if (!takes_sum())
    for (const at::Tensor& parameter : outlook.parameters) reduced.push_back(parameter.grad());
  return agree_on_step(group_, {.request = mine,
                                .trouble = trouble,
                                .step = outlook.hash,
                                .gradients = sample_of(reduced),
                                .parameters = sample_of_parameters(areas_),
                                .loaded = copy_watch_ ? copy_watch_->loaded() : 0});
}

void ShardedStep::step_slices(const std::vector<at::Tensor>& parameters) {
  const bool sums = takes_sum();
  if (!sums || !sum_.settlement().is_void) {
    if (sums) sum_.collect();
    std::unordered_set<const c10::TensorImpl*> stepped;
    for (const at::Tensor& parameter : parameters) stepped.insert(parameter.unsafeGetTensorImpl());
    areas_.forget_others();
    bytes_moved_ += slices_->run(*optimizer_, gradients_);
    areas_.gather_parameters(
        [&](const Areas::Parameter& parameter) { return stepped.contains(parameter.tensor.unsafeGetTensorImpl()); });
    for (const at::Tensor& parameter : parameters) parameter.unsafeGetTensorImpl()->bump_version();
  }
  if (copy_watch_) copy_watch_->slices_written();
  if (sums) {
    sum_.conclude();
  } else if (areas_.memory() != nullptr) {
    const OperationLabel label("the end of an optimizer's step");
    group_.barrier();
  }
  if (copy_watch_) copy_watch_->step_ended();
}

void ShardedStep::step() {
  const at::NoGradGuard no_grad;
  const std::unique_lock alone(stepping_, std::try_to_lock);
  TORCH_CHECK(alone.owns_lock(), kTwoThreads);
  check_model();
  if (model_.join.shadowing && takes_sum()) return;  // it has followed the others
  const Reducer::Stepping here(*model_.reducer);
  watch_.step_begins();
  const std::string problem = trouble();
  if (takes_sum()) sum_.settle(Reducer::Share::kGradients);
  const auto outlook = prepare(problem);
  agree({.action = StepAction::kStep}, problem, outlook);
  if (!takes_sum() || all_have_inputs(sum_.settlement().ranks)) model_.check_before_step();
  step_slices(outlook.parameters);
  note_optimizer_in_use(optimizer_, model_is_there_);
}

std::string ShardedStep::backward_begins(bool gradients_wait) {
  if (copy_watch_) return copy_watch_->trouble();
  return wants_sum() ? watch_.backward_begins(gradients_wait) : "";
}

std::vector<Facts> ShardedStep::step_without_inputs() {
  const at::NoGradGuard no_grad;
  watch_.step_begins();
  const std::string problem = trouble();
  const auto ranks = sum_.settle(Reducer::Share::kOutOfInputs).ranks;
  if (std::none_of(ranks.begin(), ranks.end(), [](const Facts& facts) { return facts.active; })) {
    sum_.conclude();
    return ranks;
  }
  for (;;) {
    const auto outlook = prepare(problem);
    const StepRequest request = agree({.action = StepAction::kFollow}, problem, outlook);
    if (request.action == StepAction::kStep) {
      step_slices(outlook.parameters);
      return ranks;
    }
    clip(request);
  }
}

double ShardedStep::clip_grad_norm(double max_norm, double type) {
  const at::NoGradGuard no_grad;
  if (model_.join.shadowing) return norm_;
  const std::string problem = trouble();
  {
    const OperationLabel label(kClipGradNorm);
    sum_.settle(Reducer::Share::kGradients);
  }
  clip(agree({StepAction::kClip, max_norm, type}, problem, {}));
  return norm_;
}

void ShardedStep::clip(const StepRequest& request) {
  norm_ = 0;
  if (sum_.settlement().is_void) return;
  sum_.collect();
  norm_ = sum_.norm(request.norm_type);
  const double factor = request.max_norm / (norm_ + 1e-6);
  if (std::isnan(factor) || factor < 1) sum_.multiply(factor);
}

std::vector<at::Tensor> trained_parameters(const Replica& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state_of(model).attached.trained()) tensors.push_back(tensor);
  return tensors;
}

}  // namespace lockstep::detail
