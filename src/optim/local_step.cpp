#include "optim/local_step.h"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/shared_weights.h"
#include "checkpoint/master_state.h"
#include "collectives/storages.h"
#include "optim/sharded_step.h"
#include "optim/step_plan.h"

// The step of all parameters of one process. First it checks for errors; then it determines the constants and memory of
// each parameter; then the kernels run.

namespace lockstep::detail {
namespace {

at::Tensor plain_zeros(const at::Tensor& like, int, at::ScalarType dtype) {
  return at::empty_strided(like.sizes(), like.strides(), like.options().dtype(dtype).requires_grad(false)).zero_();
}

/// Brings the tensor into the kernels' form, or makes zeros if it is undefined. Returns its address.
std::byte* prepare(at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& parameter, int array,
                   const StateZeros& zeros) {
  tensor = tensor.defined() ? optim::laid_out(tensor, dtype, parameter) : zeros(parameter, array, dtype);
  return static_cast<std::byte*>(tensor.mutable_data_ptr());
}

optim::Plan plan(torch::optim::Optimizer& optimizer, const Formula& formula, const optim::Intent& intent, bool masters,
                 const StateZeros& zeros) {
  const at::Tensor& parameter = intent.parameter;
  const bool master = masters && optim::is_16_bit(parameter.scalar_type());
  const int arrays = optim::state_arrays(intent.algorithm);
  optim::Plan result = optim::plan_of(intent, optim::own_gradient(intent), master);
  if (arrays == 0 && !master) return result;
  auto& state = optim::state_of(optimizer, parameter, formula, master);
  const at::ScalarType dtype = master ? at::kFloat : parameter.scalar_type();
  for (int a = 0; a < arrays; ++a) {
    at::Tensor array = formula.array(state, a);
    result.arrays[static_cast<size_t>(a)] = prepare(array, dtype, parameter, a, zeros);
    formula.set_array(state, a, array);
  }
  if (master)
    result.master = prepare(dynamic_cast<Master&>(state).master_param, at::kFloat, parameter, kMasterArray, zeros);
  formula.count(state);
  return result;
}

class LocalStep final : public Stepper {
 public:
  LocalStep(torch::optim::Optimizer& optimizer, const StepKind& kind, const ZeroRedundancyOptions& options,
            StateZeros zeros)
      : optimizer_(&optimizer), kind_(kind), options_(options), zeros_(std::move(zeros)) {}

  void step() override {
    const at::NoGradGuard no_grad;
    check_parameters(*optimizer_, kind_.formula, options_);
    if (optim::device_of(*optimizer_).is_cpu())
      step_by_kernels();
    else
      kind_.own_step(*optimizer_);
  }
  void move_to(torch::optim::Optimizer& optimizer) override { optimizer_ = &optimizer; }

 private:
  void step_by_kernels() {
    const Formula& formula = formula_of(kind_.formula);
    const auto intents =
        optim::intents_of(*optimizer_, formula, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
    std::vector<optim::Plan> plans;
    for (const optim::Intent& intent : intents)
      plans.push_back(plan(*optimizer_, formula, intent, options_.master_weights, zeros_));
    optim::run(plans);
    for (const optim::Intent& intent : intents)
      if (!intent.parameter.is_inference()) intent.parameter.unsafeGetTensorImpl()->bump_version();
  }

  torch::optim::Optimizer* optimizer_;
  const StepKind kind_;
  const ZeroRedundancyOptions options_;
  const StateZeros zeros_;
};

/// Describes trouble with parameters that an earlier optimizer keeps once for all ranks.
std::string trouble_of_shared(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return trouble_of(shared_weights_in(storages_of(parameters)));
}

}  // namespace

void check_parameters(const torch::optim::Optimizer& optimizer, FormulaKind kind,
                      const ZeroRedundancyOptions& options) {
  TORCH_CHECK(kind != FormulaKind::kNone || !options.master_weights,
              "ZeroRedundancyOptimizer: master_weights needs SGD, Adam or AdamW; other optimizers step by themselves");
  if (kind == FormulaKind::kNone) return;
  const std::string problem = optim::problem_of(optimizer);
  TORCH_CHECK(problem.empty(), problem);
}

std::unique_ptr<Stepper> make_stepper(const Replica* model, torch::optim::Optimizer& optimizer, const StepKind& kind,
                                      const ZeroRedundancyOptions& options) {
  TORCH_CHECK(options.state_folder.empty(),
              "ZeroRedundancyOptimizer: state_folder is for the parts of a FullyShardedDataParallel; leave it empty");
  if (model != nullptr && state_of(*model).group.world_size() > 1) {
    for (const std::string& problem : {optim::problem_of(optimizer), trouble_of_shared(optimizer)})
      TORCH_CHECK(problem.empty(), problem);
    return std::make_unique<ShardedStep>(*model, optimizer, kind, options);
  }
  return make_local_stepper(optimizer, kind, options, plain_zeros);
}

std::unique_ptr<Stepper> make_local_stepper(torch::optim::Optimizer& optimizer, const StepKind& kind,
                                            const ZeroRedundancyOptions& options, StateZeros zeros) {
  if (kind.formula == FormulaKind::kNone) return nullptr;
  return std::make_unique<LocalStep>(optimizer, kind, options, std::move(zeros));
}

}  // namespace lockstep::detail
