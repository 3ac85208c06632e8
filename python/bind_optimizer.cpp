// lockstep._C: the step of a ZeroRedundancyOptimizer. Python's half, an ordinary torch.optim.Optimizer, holds the
// options, and hands them over with each step; what is remembered of the parameters lies here.

#include <tuple>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <torch/csrc/utils/pybind.h>

#include <lockstep/error.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/shared_weights.h"
#include "base/weights_set.h"
#include "collectives/sample.h"
#include "collectives/storages.h"
#include "data_parallel/replica_state.h"
#include "python_replica.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_marks.h"

namespace lockstep::python {
namespace {

namespace py = pybind11;

using Groups = std::vector<std::vector<at::Tensor>>;

template <typename T>
T entry(const py::dict& from, const char* name) {
  return from[name].cast<T>();
}

void take(torch::optim::SGDOptions& options, const py::dict& from) {
  options.lr(entry<double>(from, "lr"));
  options.momentum(entry<double>(from, "momentum"));
  options.dampening(entry<double>(from, "dampening"));
  options.weight_decay(entry<double>(from, "weight_decay"));
  options.nesterov(entry<bool>(from, "nesterov"));
}

template <typename AdamLike>
void take(AdamLike& options, const py::dict& from) {
  options.lr(entry<double>(from, "lr"));
  options.betas(entry<std::tuple<double, double>>(from, "betas"));
  options.eps(entry<double>(from, "eps"));
  options.weight_decay(entry<double>(from, "weight_decay"));
  options.amsgrad(entry<bool>(from, "amsgrad"));
}

/// The names are those of torch.optim's state_dict().
py::dict told(const torch::optim::SGDParamState& state) {
  py::dict told;
  if (state.momentum_buffer().defined()) told["momentum_buffer"] = state.momentum_buffer();
  return told;
}

template <typename AdamLike>
py::dict told(const AdamLike& state) {
  py::dict told;
  told["step"] = state.step();
  told["exp_avg"] = state.exp_avg();
  told["exp_avg_sq"] = state.exp_avg_sq();
  if (state.max_exp_avg_sq().defined()) told["max_exp_avg_sq"] = state.max_exp_avg_sq();
  return told;
}

at::Tensor tensor_of(const py::dict& from, const char* name) {
  return from.contains(name) && !from[name].is_none() ? entry<at::Tensor>(from, name) : at::Tensor();
}

void load(torch::optim::SGDParamState& state, const py::dict& from) {
  state.momentum_buffer(tensor_of(from, "momentum_buffer"));
}

template <typename AdamLike>
void load(AdamLike& state, const py::dict& from) {
  state.step(entry<int64_t>(from, "step"));
  state.exp_avg(tensor_of(from, "exp_avg"));
  state.exp_avg_sq(tensor_of(from, "exp_avg_sq"));
  state.max_exp_avg_sq(tensor_of(from, "max_exp_avg_sq"));
}

TensorSet set_of(const std::vector<at::Tensor>& tensors) {
  TensorSet set;
  for (const at::Tensor& tensor : tensors) set.insert(tensor.unsafeGetTensorImpl());
  return set;
}

/// Called when a GradScaler of torch has divided the gradients of an optimizer by `scale`. Returns whether it has found
/// infinity or NaN on any rank. `accept`: nothing else has changed them since backward.
/// REQUIRES: every rank calls it.
bool unscaled(const PythonReplica& replica, const std::vector<at::Tensor>& parameters, double scale, bool found,
              bool accept) {
  const TensorSet set = set_of(parameters);
  const auto known = known_gradients(set);
  TORCH_CHECK(!known || !known->settled,
              "GradScaler: clip_grad_norm() has already taken the gradients, which had the scale; call "
              "scaler.unscale_(optimizer) before it");
  if (accept) accept_gradients(set);
  const Group& group = state_of(replica).group;
  if (group.world_size() == 1) return found;
  TORCH_CHECK(
      !known || known->ranks,
      "GradScaler: gradients of passes within no_sync() or accumulate() are not reduced yet, or this rank is in "
      "join(), where ranks may have no gradients to divide; call the scaler's unscale_() and step() outside");
  const OperationLabel label("GradScaler");
  const auto rounded = static_cast<float>(scale);
  const at::Tensor said = at::tensor({found ? 1.0F : 0.0F, rounded, -rounded});
  group.all_reduce(said, ReduceOp::kMax);
  const auto* numbers = said.const_data_ptr<float>();
  if (numbers[1] != -numbers[2])
    throw Error(c10::str("GradScaler: the ranks have different scales, from ", -numbers[2], " to ", numbers[1],
                         "; make it with the same options and load the same state on every rank"));
  return numbers[0] > 0;
}

/// Whether ranks hold one copy of these parameters, which something has changed that may not.
bool are_wrong(const std::vector<at::Tensor>& parameters) {
  return !trouble_of(shared_weights_in(storages_of(parameters))).empty();
}

/// Called when a module has loaded these values into these parameters, as every rank may.
void note_loaded(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& values) {
  const auto storages = storages_of(parameters);
  if (!shared_weights_in(storages).empty()) note_weights_loaded(storages, samples_of(values));
}

/// The three optimizers as seen by Python.
class Stepper {
 public:
  virtual ~Stepper() = default;
  /// A dictionary of options for each group.
  virtual void step(const std::vector<py::dict>& options) = 0;
  /// Empty where nothing is remembered.
  virtual py::dict state(const at::Tensor& parameter) = 0;
  virtual void load_state(const at::Tensor& parameter, const py::dict& state) = 0;
};

template <typename Optimizer, typename Options, typename State>
class StepperOf final : public Stepper {
 public:
  StepperOf(std::shared_ptr<PythonReplica> replica, const Groups& groups, ZeroRedundancyOptions options)
      : replica_(std::move(replica)), optimizer_(*replica_, with_options(groups), Options(0), options) {}

  void step(const std::vector<py::dict>& options) override {
    auto& groups = optimizer_.param_groups();
    TORCH_CHECK(options.size() == groups.size(), "ZeroRedundancyOptimizer was made for ", groups.size(),
                " parameter groups, and now there are ", options.size(), "; make a new one");
    for (size_t i = 0; i < options.size(); ++i) take(static_cast<Options&>(groups[i].options()), options[i]);
    const py::gil_scoped_release unlocked;
    optimizer_.step();
  }
  py::dict state(const at::Tensor& parameter) override {
    const auto found = optimizer_.state().find(parameter.unsafeGetTensorImpl());
    return found == optimizer_.state().end() ? py::dict() : told(static_cast<const State&>(*found->second));
  }
  void load_state(const at::Tensor& parameter, const py::dict& from) override {
    auto state = std::make_unique<State>();
    load(*state, from);
    optimizer_.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }

 private:
  static std::vector<torch::optim::OptimizerParamGroup> with_options(const Groups& groups) {
    std::vector<torch::optim::OptimizerParamGroup> made;
    for (const auto& group : groups) made.emplace_back(group, std::make_unique<Options>(0));
    return made;
  }

  const std::shared_ptr<PythonReplica> replica_;  ///< outlives the optimizer
  ZeroRedundancyOptimizer<Optimizer> optimizer_;
};

template <typename Optimizer, typename Options, typename State>
std::unique_ptr<Stepper> make(std::shared_ptr<PythonReplica> replica, const Groups& groups, bool shared_parameters) {
  const py::gil_scoped_release unlocked;
  ZeroRedundancyOptions options;
  options.shared_parameters = shared_parameters;
  return std::make_unique<StepperOf<Optimizer, Options, State>>(std::move(replica), groups, options);
}

}  // namespace

void bind_optimizer(py::module_& module) {
  using namespace torch::optim;
  py::class_<Stepper>(module, "Stepper")
      .def("step", &Stepper::step)
      .def("state", &Stepper::state)
      .def("load_state", &Stepper::load_state);
  module.def("gradients_were_changed",
             [](const std::vector<at::Tensor>& parameters) { return gradients_were_changed(set_of(parameters)); });
  module.def("unscaled", &unscaled, py::call_guard<py::gil_scoped_release>());
  module.def("are_wrong", &are_wrong);
  module.def("note_loaded", &note_loaded);
  module.def("make_sgd", &make<SGD, SGDOptions, SGDParamState>);
  module.def("make_adam", &make<Adam, AdamOptions, AdamParamState>);
  module.def("make_adamw", &make<AdamW, AdamWOptions, AdamWParamState>);
}

}  // namespace lockstep::python
