#include <functional>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

using torch::optim::OptimizerParamGroup;

/// One remembered tensor of one parameter, under PyTorch's name: how to read it and how to put it back.
struct Field {
  const char* name;
  std::function<at::Tensor(OptimizerParamState&)> get;
  std::function<void(OptimizerParamState&, const at::Tensor&)> set;
  /// Whether a parameter of the group that has a state has this in it.
  std::function<bool(const OptimizerParamGroup&)> needed = [](const auto&) { return true; };
  bool is_scalar = false;  ///< else as large as the parameter
};

struct Kind {
  std::vector<Field> fields;
  std::function<std::unique_ptr<OptimizerParamState>()> make;
};

template <typename State>
Field tensor_field(const char* name, at::Tensor& (State::*mutable_access)()) {
  return {name, [=](OptimizerParamState& state) { return (static_cast<State&>(state).*mutable_access)(); },
          [=](OptimizerParamState& state, const at::Tensor& value) {
            (static_cast<State&>(state).*mutable_access)() = value;
          }};
}

/// Python keeps the step as a float32 scalar.
template <typename State>
Field step_field() {
  Field field{
      "step",
      [](OptimizerParamState& state) { return at::scalar_tensor(static_cast<State&>(state).step(), at::kFloat); },
      [](OptimizerParamState& state, const at::Tensor& value) {
        static_cast<State&>(state).step(static_cast<int64_t>(value.item<double>()));
      }};
  field.is_scalar = true;
  return field;
}

/// What Adam and AdamW remember. LibTorch overloads the accessors, hence the casts.
template <typename State, typename Options>
Kind adam_kind() {
  using Access = at::Tensor& (State::*)();
  Field greatest = tensor_field("max_exp_avg_sq", static_cast<Access>(&State::max_exp_avg_sq));
  greatest.needed = [](const OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options()).amsgrad();
  };
  return {{step_field<State>(), tensor_field("exp_avg", static_cast<Access>(&State::exp_avg)),
           tensor_field("exp_avg_sq", static_cast<Access>(&State::exp_avg_sq)), greatest},
          [] { return std::make_unique<State>(); }};
}

Kind kind_of(const Optimizer& optimizer) {
  using torch::optim::SGDParamState;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) {
    using Access = at::Tensor& (SGDParamState::*)();
    return {{tensor_field("momentum_buffer", static_cast<Access>(&SGDParamState::momentum_buffer))},
            [] { return std::make_unique<SGDParamState>(); }};
  }
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer))
    return adam_kind<torch::optim::AdamWParamState, torch::optim::AdamWOptions>();
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer))
    return adam_kind<torch::optim::AdamParamState, torch::optim::AdamOptions>();
  TORCH_CHECK(false, "the state of this optimizer is not known to Lockstep; it knows SGD, Adam and AdamW");
}

struct Parameter {
  at::Tensor tensor;
  const OptimizerParamGroup* group;
};

std::vector<Parameter> parameters_of(const Optimizer& optimizer) {
  std::vector<Parameter> parameters;
  for (const auto& group : optimizer.param_groups())
    for (const auto& tensor : group.params()) parameters.push_back({tensor, &group});
  return parameters;
}

std::string key_of(size_t place, const Field& field) { return std::to_string(place) + "." + field.name; }

/// Empty where `value` may be put into `field` of a parameter.
std::string problem_of(const at::Tensor& value, const Field& field, const at::Tensor& parameter) {
  std::ostringstream text;
  if (value.sizes() != (field.is_scalar ? at::IntArrayRef() : parameter.sizes())) {
    text << "shape " << value.sizes() << " given, ";
    if (field.is_scalar)
      text << "a scalar expected";
    else
      text << parameter.sizes() << " in the parameter";
  } else if (value.is_complex() && !parameter.is_complex()) {
    text << "complex numbers given for a parameter of real ones";
  } else if (field.is_scalar && !(value.item<double>() >= 0 && value.item<double>() < 1e15)) {
    text << value.item<double>() << " is no number of steps";
  }
  return text.str();
}

/// The state of the parameter at `place`, or null where the file has none; adds to `problems` and `used`.
std::unique_ptr<OptimizerParamState> read_state(const Kind& kind, size_t place, const Parameter& parameter,
                                                const StateDict& state, std::string& problems, size_t& used) {
  std::unique_ptr<OptimizerParamState> result;
  std::string missing;
  for (const Field& field : kind.fields) {
    const at::Tensor* value = state.find(key_of(place, field));
    if (value == nullptr) {
      if (field.needed(*parameter.group)) missing += "\n  missing: " + key_of(place, field);
      continue;
    }
    ++used;
    if (!result) result = kind.make();
    const std::string problem = problem_of(*value, field, parameter.tensor);
    if (!problem.empty())
      problems += "\n  " + key_of(place, field) + ": " + problem;
    else
      field.set(*result, field.is_scalar ? *value : at::empty_like(parameter.tensor).copy_(*value));
  }
  if (result) problems += missing;
  return result;
}

}  // namespace

StateDict state_dict(const Optimizer& optimizer) {
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  StateDict result;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = optimizer.state().find(parameters[i].tensor.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    for (const Field& field : kind.fields) {
      const at::Tensor value = field.get(*found->second);
      if (value.defined()) result.insert(key_of(i, field), value);
    }
  }
  return result;
}

void load_state_dict(Optimizer& optimizer, const StateDict& state) {
  at::NoGradGuard no_grad;
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  // Everything is built aside first, so that an error changes nothing.
  std::vector<std::unique_ptr<OptimizerParamState>> states;
  std::string problems;
  size_t used = 0;
  for (size_t i = 0; i < parameters.size(); ++i)
    states.push_back(read_state(kind, i, parameters[i], state, problems, used));
  if (used != state.size()) {
    std::set<std::string> known;
    for (size_t i = 0; i < parameters.size(); ++i)
      for (const Field& field : kind.fields) known.insert(key_of(i, field));
    for (const auto& item : state)
      if (!known.contains(item.key())) problems += "\n  unknown: " + item.key();
  }
  if (!problems.empty())
    throw Error("the state does not fit the optimizer, so it is of another kind of optimizer or of another model:" +
                problems);
  for (size_t i = 0; i < parameters.size(); ++i) {
    void* key = parameters[i].tensor.unsafeGetTensorImpl();
    if (states[i])
      optimizer.state()[key] = std::move(states[i]);
    else
      optimizer.state().erase(key);
  }
}

}  // namespace lockstep
