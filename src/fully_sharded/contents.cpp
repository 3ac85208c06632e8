#include "fully_sharded/contents.h"

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/text.h"
#include "checkpoint/sliced_memory.h"
#include "collectives/sample.h"

namespace lockstep::fully_sharded {
namespace {

/// The elements of a parameter, in its order of memory, that Unit::set_from() takes on this rank.
std::pair<int64_t, int64_t> taken_by(const Unit& unit, const Unit::Parameter& parameter, const MachineGroups& groups) {
  if (!unit.stays_gathered()) return {parameter.begin, std::max(parameter.begin, parameter.end)};
  const int64_t piece = unit.slice_elements() * groups.machines();
  const int64_t begin = groups.rank_here() * piece - parameter.offset, elements = parameter.tensor.numel();
  return {std::clamp<int64_t>(begin, 0, elements), std::clamp<int64_t>(begin + piece, 0, elements)};
}

/// Throws on all ranks if they were given states that differ, which a few elements of each tensor tell.
void check_same_state(const Group& group, const StateDict& state) {
  std::string lines;
  for (const auto& item : state) {
    if (item.value().has_storage() && is_partial(item.value().storage())) continue;  // from one state in memory
    lines += item.key() + " " + std::to_string(sample_of(item.value())) + '\n';
  }
  const std::string difference = first_difference("tensor", group.all_gather_bytes(lines));
  if (!difference.empty())
    throw RefusedInput("the ranks were given different states: " + difference +
                       " (the numbers are hashes of some elements). Every rank must load the same file");
}

}  // namespace

void Contents::read_all(const std::function<void(const std::string&, const at::Tensor&)>& visit) {
  const at::NoGradGuard no_grad;
  std::unordered_map<const Unit::Parameter*, size_t> unit_of;
  for (size_t number = 0; number < units_.size(); ++number)
    for (const Unit::Parameter& parameter : units_[number].parameters()) unit_of.emplace(&parameter, number);
  std::optional<size_t> there;  // a unit's parameters are consecutive in the module
  at::Tensor memory;
  for (const auto& item : module_.named_parameters()) {
    if (!item.value().defined()) continue;
    const Unit::Parameter& parameter = edits_.parameter_of(item.value());
    const size_t number = unit_of.at(&parameter);
    Unit& unit = units_[number];
    if (!unit.stays_gathered() && std::exchange(there, number) != number)
      memory = gathering_.read(number).narrow(0, 0, unit.bytes()).view(unit.dtype());
    if (groups_.all().rank() == 0)
      visit(item.key(), unit.stays_gathered() ? parameter.tensor.detach() : Unit::view(memory, parameter));
  }
}

StateDict Contents::in_slices() const {
  std::unordered_map<const Unit::Parameter*, at::Tensor> values;
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters())
      values[&parameter] = Unit::view(unit.memory(), parameter);
  StateDict state;
  for (const auto& item : module_.named_parameters())
    if (item.value().defined()) state.insert(item.key(), values.at(&edits_.parameter_of(item.value())));
  return state;
}

std::vector<detail::ElementRange> Contents::elements_to_load(const StateDict& state) const {
  std::vector<detail::ElementRange> elements;
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters()) {
      const at::Tensor* given = state.find(parameter.name);
      if (given == nullptr) continue;
      auto [begin, end] = taken_by(unit, parameter, groups_);
      if (given->strides() != parameter.tensor.strides()) begin = 0, end = given->numel();
      elements.push_back({*given, begin, end});
    }
  return elements;
}

PartStates::Places Contents::part_places() const {
  PartStates::Places places;
  for (size_t number = 0; number < units_.size(); ++number)
    for (const Unit::Parameter& parameter : units_[number].parameters())
      places[parameter.part.unsafeGetTensorImpl()] = {.name = parameter.name,
                                                      .sizes = parameter.tensor.sizes().vec(),
                                                      .strides = parameter.tensor.strides().vec(),
                                                      .unit = number,
                                                      .slice_elements = units_[number].slice_elements(),
                                                      .offset = parameter.offset,
                                                      .begin = parameter.begin,
                                                      .end = parameter.end};
  return places;
}

void Contents::load(const StateDict& state) {
  const at::NoGradGuard no_grad;
  std::string problems;
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters()) {
      const at::Tensor* given = state.find(parameter.name);
      if (given == nullptr)
        problems += "\n  missing: " + parameter.name;
      else if (given->sizes() != parameter.tensor.sizes())
        problems += c10::str("\n  shape of ", parameter.name, ": ", given->sizes(), " given, ",
                             parameter.tensor.sizes(), " in the module");
      else if (given->scalar_type() != parameter.tensor.scalar_type() || !given->is_cpu())
        problems += c10::str("\n  type of ", parameter.name, ": ", given->toString(), " given, ",
                             parameter.tensor.toString(), " in the module");
    }
  for (const auto& item : state)
    if (module_.named_parameters().find(item.key()) == nullptr) problems += "\n  unknown: " + item.key();
  const auto all = groups_.all().all_gather_bytes(problems);
  if (!problems.empty()) throw RefusedInput("the state does not fit the module:" + problems);
  for (const std::string& other : all)
    if (!other.empty()) throw RefusedInput("the state of another rank does not fit the module:" + other);
  check_same_state(groups_.all(), state);
  gathering_.forget();
  for (Unit& unit : units_) {
    const at::Tensor memory = at::zeros({unit.elements()}, unit.dtype());
    for (const Unit::Parameter& parameter : unit.parameters())
      Unit::view(memory, parameter).copy_(state[parameter.name]);
    unit.set_from(memory);
    for (const Unit::Parameter& parameter : unit.parameters()) parameter.tensor.unsafeGetTensorImpl()->bump_version();
    unit.remember();
  }
}

}  // namespace lockstep::fully_sharded
