#include <map>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/checkpoint.h>
#include <lockstep/master_weights.h>

#include "base/error.h"
#include "base/state_in_use.h"
#include "checkpoint/optimizer_kind.h"
#include "checkpoint/optimizer_state.h"
#include "checkpoint/slice_holders.h"
#include "checkpoint/state_fit.h"

namespace lockstep {
namespace {

using Field = OptimizerField;
using Option = OptimizerOption;
using Kind = OptimizerKind;

struct Parameter {
  at::Tensor tensor;
  const OptimizerParamGroup* group;
  std::vector<int64_t> sizes;  ///< of the parameter's state
};

std::vector<Parameter> parameters_of(const Optimizer& optimizer) {
  const auto* keeper = dynamic_cast<const detail::KeepsSlices*>(&optimizer);
  std::vector<Parameter> parameters;
  for (const auto& group : optimizer.param_groups())
    for (const auto& tensor : group.params())
      parameters.push_back({tensor, &group, (keeper ? keeper->sizes_of(tensor) : tensor.sizes()).vec()});
  return parameters;
}

/// Called before state() is read for saving.
void complete(const Optimizer& optimizer) {
  if (const auto* keeper = dynamic_cast<const detail::KeepsSlices*>(&optimizer)) keeper->complete_state();
}
/// Called before state() is replaced.
void check_known(const Optimizer& optimizer) {
  if (const auto* keeper = dynamic_cast<const detail::KeepsSlices*>(&optimizer)) keeper->check_state_is_known();
}

std::string key_of(size_t place, const Field& field) { return std::to_string(place) + "." + field.name; }

/// The reason why `value` does not fit into `field` of a parameter; empty if it fits.
std::string problem_of(const at::Tensor& value, const Field& field, const at::Tensor& parameter,
                       at::IntArrayRef sizes) {
  std::string problem = field.is_scalar ? problem_of_given(value) : problem_of_copy(value, parameter, "the parameter");
  if (!problem.empty()) return problem;
  std::ostringstream text;
  if (value.sizes() != (field.is_scalar ? at::IntArrayRef() : sizes)) {
    text << "shape " << value.sizes() << " given, ";
    if (field.is_scalar)
      text << "expected a scalar";
    else
      text << sizes << " in the parameter";
  } else if (value.is_complex() && !parameter.is_complex()) {
    text << "complex numbers given for a parameter of real ones";
  } else if (field.is_scalar && !(value.item<double>() >= 0 && value.item<double>() < 1e15)) {
    text << value.item<double>() << " is not a number of steps";
  }
  return text.str();
}

at::TensorOptions options_of(const Kind& kind, const at::Tensor& parameter) {
  const bool is_16_bit = parameter.scalar_type() == at::kHalf || parameter.scalar_type() == at::kBFloat16;
  return kind.masters && is_16_bit ? parameter.options().dtype(at::kFloat) : parameter.options();
}

enum class Tensors { kCopy, kKeep };

/// `value` in its own memory and layout, or itself if it may be kept unchanged.
at::Tensor own(const at::Tensor& value, const at::TensorOptions& options, const at::Tensor& parameter,
               Tensors tensors) {
  if (tensors == Tensors::kKeep && value.options().type_equal(options)) return value;
  if (value.sizes() != parameter.sizes()) return value.to(options, /*non_blocking=*/false, /*copy=*/true);
  return at::empty_like(parameter, options).copy_(value);
}

/// The state of the parameter at `place`, or null if the file has none. Adds to `problems` and `used`.
std::unique_ptr<OptimizerParamState> read_state(const Kind& kind, size_t place, const Parameter& parameter,
                                                const StateDict& state, Tensors tensors, std::string& problems,
                                                size_t& used) {
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
    const std::string problem = problem_of(*value, field, parameter.tensor, parameter.sizes);
    if (!problem.empty())
      problems += "\n  " + key_of(place, field) + ": " + problem;
    else
      field.set(*result,
                field.is_scalar ? *value : own(*value, options_of(kind, parameter.tensor), parameter.tensor, tensors));
  }
  if (result || kind.remembers_from_start) problems += missing;
  return result;
}

}  // namespace

StateDict state_dict(const Optimizer& optimizer) {
  complete(optimizer);
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

namespace {

using States = std::vector<std::unique_ptr<OptimizerParamState>>;

/// Everything is built separately first, so that an error changes nothing.
States read_states(const Kind& kind, const std::vector<Parameter>& parameters, const StateDict& state, Tensors tensors,
                   std::string& problems) {
  at::NoGradGuard no_grad;
  States states;
  size_t used = 0;
  for (size_t i = 0; i < parameters.size(); ++i)
    states.push_back(read_state(kind, i, parameters[i], state, tensors, problems, used));
  if (used == state.size()) return states;
  std::set<std::string> known;
  for (size_t i = 0; i < parameters.size(); ++i)
    for (const Field& field : kind.fields) known.insert(key_of(i, field));
  for (const auto& item : state)
    if (!known.contains(item.key())) problems += "\n  unknown: " + item.key();
  return states;
}

void check(const std::string& problems) {
  if (!problems.empty())
    throw RefusedInput(
        "the state does not fit the optimizer; it belongs to another kind of optimizer or to another model:" +
        problems);
}

void apply(Optimizer& optimizer, const std::vector<Parameter>& parameters, States states) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    void* key = parameters[i].tensor.unsafeGetTensorImpl();
    if (states[i])
      optimizer.state()[key] = std::move(states[i]);
    else
      optimizer.state().erase(key);
  }
}

// ---- Python's layout ----

using Object = c10::impl::GenericDict;

Object new_object() { return Object(c10::AnyType::get(), c10::AnyType::get()); }

/// The value of a dictionary, or None.
c10::IValue value_of(const Object& object, const c10::IValue& key) {
  const auto found = object.find(key);
  return found == object.end() ? c10::IValue() : found->value();
}

bool same(const c10::IValue& a, const c10::IValue& b) { return a.isBool() && b.isBool() && a.toBool() == b.toBool(); }

/// Copies of the groups' options with the state's values. Adds mismatches to `problems`.
std::vector<std::unique_ptr<OptimizerOptions>> read_options(const Optimizer& optimizer, const Kind& kind,
                                                            const std::vector<c10::IValue>& groups,
                                                            std::string& problems) {
  std::vector<std::unique_ptr<OptimizerOptions>> result;
  for (size_t i = 0; i < groups.size(); ++i) {
    const Object group = groups[i].toGenericDict();
    result.push_back(optimizer.param_groups()[i].options().clone());
    const std::string place = "\n  param_groups." + std::to_string(i) + ".";
    for (const Option& option : kind.options) {
      const c10::IValue value = value_of(group, std::string(option.name));
      try {
        if (value.isNone()) throw RefusedInput("is missing");
        option.set(*result.back(), value);
      } catch (const Error& error) {
        problems += place + option.name + " " + error.what();
      }
    }
    for (const auto& [name, expected] : kind.fixed) {
      const bool matters = std::string(name) == "maximize" || std::string(name) == "decoupled_weight_decay";
      const c10::IValue value = value_of(group, std::string(name));
      if (matters && !value.isNone() && !same(value, expected))
        problems += place + name + " has a value that LibTorch's optimizer of this name does not support";
    }
  }
  return result;
}

/// Python numbers the parameters; only their order in the groups matters.
std::map<int64_t, size_t> places_of(const std::vector<c10::IValue>& groups, const Optimizer& optimizer,
                                    std::string& problems) {
  std::map<int64_t, size_t> places;
  size_t place = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    const c10::IValue params = value_of(groups[i].toGenericDict(), std::string("params"));
    std::vector<c10::IValue> numbers;
    if (params.isList()) numbers = params.toList().vec();
    const size_t own = optimizer.param_groups()[i].params().size();
    if (numbers.size() != own)
      problems += "\n  param_groups." + std::to_string(i) + ".params: " + std::to_string(numbers.size()) +
                  " parameters given, " + std::to_string(own) + " in the optimizer";
    for (const c10::IValue& number : numbers)
      if (!number.isInt() || !places.emplace(number.toInt(), place++).second)
        problems += "\n  param_groups." + std::to_string(i) + ".params must be numbers that are all different";
  }
  return places;
}

StateDict flat_state(const Object& state, const std::map<int64_t, size_t>& places, std::string& problems) {
  StateDict flat;
  for (const auto& entry : state) {
    const bool known = entry.key().isInt() && places.contains(entry.key().toInt());
    if (!known || !entry.value().isGenericDict()) {
      problems += "\n  state has an entry that belongs to no parameter";
      continue;
    }
    const std::string place = std::to_string(places.at(entry.key().toInt())) + ".";
    for (const auto& item : entry.value().toGenericDict()) {
      if (item.value().isNone()) continue;  // Python's SGD without momentum
      const std::string name = place + (item.key().isString() ? item.key().toStringRef() : "?");
      if (item.value().isTensor())
        flat.insert(name, item.value().toTensor());
      else if (item.value().isInt() || item.value().isDouble())  // the step, as older releases wrote it
        flat.insert(name, at::scalar_tensor(number_of(item.value()), at::kDouble));
      else
        problems += "\n  " + name + " is not a tensor";
    }
  }
  return flat;
}

c10::IValue object_of(const Optimizer& optimizer) {
  note_optimizer_kept(&optimizer);
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  Object state = new_object();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = optimizer.state().find(parameters[i].tensor.unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    Object entry = new_object();
    for (const Field& field : kind.fields)
      if (const at::Tensor value = field.get(*found->second); value.defined())
        entry.insert(std::string(field.name), value);
    state.insert(static_cast<int64_t>(i), entry);
  }
  c10::impl::GenericList groups(c10::AnyType::get());
  int64_t place = 0;
  for (const auto& group : optimizer.param_groups()) {
    Object entry = new_object();
    for (const Option& option : kind.options) entry.insert(std::string(option.name), option.get(group.options()));
    for (const auto& [name, value] : kind.fixed) entry.insert(std::string(name), value);
    c10::impl::GenericList numbers(c10::AnyType::get());
    for (size_t i = 0; i < group.params().size(); ++i) numbers.push_back(place++);
    entry.insert(std::string("params"), numbers);
    groups.push_back(entry);
  }
  Object result = new_object();
  result.insert(std::string("state"), state);
  result.insert(std::string("param_groups"), groups);
  return result;
}

}  // namespace

void load_state_dict(Optimizer& optimizer, const StateDict& state) {
  check_known(optimizer);
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  std::string problems;
  States states = read_states(kind, parameters, state, Tensors::kCopy, problems);
  check(problems);
  apply(optimizer, parameters, std::move(states));
}

c10::IValue optimizer_state_dict(const Optimizer& optimizer) {
  complete(optimizer);
  return object_of(optimizer);
}

bool is_never_whole(const Optimizer& optimizer) {
  const auto* keeper = dynamic_cast<const detail::KeepsSlices*>(&optimizer);
  return keeper != nullptr && keeper->is_never_whole();
}

std::optional<c10::IValue> optimizer_state_in_slices(const Optimizer& optimizer, const Group& group) {
  const auto* keeper = dynamic_cast<const detail::KeepsSlices*>(&optimizer);
  const Group* const holders = keeper != nullptr ? keeper->slice_holders() : nullptr;
  if (holders == nullptr || !are_ranks_of(group, *holders, keeper->is_never_whole())) return std::nullopt;
  keeper->check_state_is_known();
  keeper->show_slices();
  const auto parameters = parameters_of(optimizer);
  if (!parameters.empty() && !parameters.front().tensor.is_cpu()) {
    // Device memory has no pages for slices that others hold. Every rank fetches them now, because possibly not every
    // rank is asked for its state next.
    keeper->complete_state();
    return std::nullopt;
  }
  return object_of(optimizer);
}

std::vector<detail::ElementRange> elements_to_load(const Optimizer& optimizer, const c10::IValue& object) {
  std::vector<detail::ElementRange> elements;
  const auto* keeper = dynamic_cast<const detail::KeepsSlices*>(&optimizer);
  if (keeper == nullptr || !object.isGenericDict()) return elements;
  const c10::IValue state = value_of(object.toGenericDict(), std::string("state"));
  const c10::IValue groups = value_of(object.toGenericDict(), std::string("param_groups"));
  // load() tells what does not fit.
  if (!state.isGenericDict() || !groups.isList() || groups.toList().size() != optimizer.param_groups().size())
    return elements;
  for (const c10::IValue& group : groups.toList().vec())
    if (!group.isGenericDict()) return elements;
  std::string problems;
  const auto places = places_of(groups.toList().vec(), optimizer, problems);
  if (!problems.empty()) return elements;
  const auto parameters = parameters_of(optimizer);
  const auto fields = kind_of(optimizer).fields;
  for (const auto& entry : state.toGenericDict()) {
    const auto place = entry.key().isInt() ? places.find(entry.key().toInt()) : places.end();
    if (place == places.end() || !entry.value().isGenericDict()) continue;
    const at::Tensor& parameter = parameters[place->second].tensor;
    for (const auto& item : entry.value().toGenericDict()) {
      if (!item.value().isTensor()) continue;
      const at::Tensor value = item.value().toTensor();
      std::pair<int64_t, int64_t> range{0, value.numel()};
      const bool is_array = std::any_of(fields.begin(), fields.end(), [&](const Field& field) {
        return !field.is_scalar && item.key().isString() && item.key().toStringRef() == field.name;
      });
      if (is_array && value.sizes() == keeper->sizes_of(parameter)) range = keeper->elements_to_load(parameter, value);
      elements.push_back({value, range.first, range.second});
    }
  }
  return elements;
}

namespace {

void load(Optimizer& optimizer, const c10::IValue& object, Tensors tensors) {
  check_known(optimizer);
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  c10::IValue state, group_list;
  if (object.isGenericDict()) {
    state = value_of(object.toGenericDict(), std::string("state"));
    group_list = value_of(object.toGenericDict(), std::string("param_groups"));
  }
  if (!state.isGenericDict() || !group_list.isList())
    throw RefusedInput("this is not the state of an optimizer: expected a dictionary with `state` and `param_groups`");
  const std::vector<c10::IValue> groups = group_list.toList().vec();
  std::string problems;
  if (groups.size() != optimizer.param_groups().size())
    check("\n  " + std::to_string(groups.size()) + " groups of parameters given, " +
          std::to_string(optimizer.param_groups().size()) + " in the optimizer");
  for (const c10::IValue& group : groups)
    if (!group.isGenericDict()) check("\n  a group of param_groups is not a dictionary");
  auto options = read_options(optimizer, kind, groups, problems);
  const auto places = places_of(groups, optimizer, problems);
  const StateDict flat = flat_state(state.toGenericDict(), places, problems);
  States states = read_states(kind, parameters, flat, tensors, problems);
  check(problems);
  apply(optimizer, parameters, std::move(states));
  for (size_t i = 0; i < groups.size(); ++i) optimizer.param_groups()[i].set_options(std::move(options[i]));
  note_optimizer_kept(&optimizer);
}

}  // namespace

void load_optimizer_state_dict(Optimizer& optimizer, const c10::IValue& object) {
  load(optimizer, object, Tensors::kCopy);
}

void adopt_optimizer_state_dict(Optimizer& optimizer, const c10::IValue& object) {
  const auto* adopter = dynamic_cast<const detail::AdoptsState*>(&optimizer);
  load(optimizer, object, adopter != nullptr && adopter->adopts_state() ? Tensors::kKeep : Tensors::kCopy);
}

}  // namespace lockstep
