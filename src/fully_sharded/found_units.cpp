#include "fully_sharded/found_units.h"

#include <algorithm>
#include <functional>
#include <unordered_map>

#include <ATen/ATen.h>

#include "data_parallel/same_model.h"
#include "fully_sharded/storage_access.h"
#include "fully_sharded/told_to_all.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_hook.h"

namespace lockstep::fully_sharded {
namespace {

constexpr const char* kRest = "the rest of the model";

bool is_within(const std::string& name, const std::string& layer) {
  return name.size() > layer.size() && name.starts_with(layer) && name[layer.size()] == '.';
}

std::vector<FoundUnits::Found> layers_in(const torch::nn::Module& module) {
  std::vector<FoundUnits::Found> found;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    auto* layer = dynamic_cast<detail::UnitBase*>(item.value().get());
    if (layer == nullptr) continue;
    for (const FoundUnits::Found& before : found) {
      TORCH_CHECK(before.layer != layer, "FullyShardedDataParallel: ", before.name, " and ", item.key(),
                  " are the same ShardedUnit, which would be called twice in a forward; make it a plain layer");
      TORCH_CHECK(!is_within(item.key(), before.name), "FullyShardedDataParallel: ", item.key(),
                  " is a ShardedUnit within ", before.name, ", another ShardedUnit; make one of them a plain layer");
    }
    found.push_back({.name = item.key(), .layer = layer, .parameters = {}});
  }
  TORCH_CHECK(
      !found.empty(),
      "FullyShardedDataParallel: the module has no units, so every machine would hold all of it; make its layers "
      "as lockstep::ShardedUnit<Layer>(...) instead of Layer(...)");
  for (const FoundUnits::Found& unit : found)
    TORCH_CHECK(!unit.layer->is_attached(), "FullyShardedDataParallel: ", unit.name,
                " already belongs to another FullyShardedDataParallel; destroy that one first");
  return found;
}

void check_parameter(const std::string& name, const at::Tensor& parameter) {
  TORCH_CHECK(!GradientHook::follows(parameter), "FullyShardedDataParallel: parameter ", name,
              " is attached to a DistributedDataParallel, which a ZeroRedundancyOptimizer may step. Make a "
              "FullyShardedDataParallel instead, and the optimizer from that; or destroy both first");
  const char* problem = nullptr;
  if (!parameter.is_cpu())
    problem = "is not on the CPU";
  else if (parameter.layout() != at::kStrided || !parameter.is_non_overlapping_and_dense())
    problem = "is sparse, or has gaps between its elements";
  else if (parameter.scalar_type() != at::kFloat && parameter.scalar_type() != at::kDouble &&
           !optim::is_16_bit(parameter.scalar_type()))
    problem = "is neither float, double, float16 nor bfloat16, the only supported types";
  TORCH_CHECK(problem == nullptr, "FullyShardedDataParallel: parameter ", name, ", a ", parameter.toString(), " of ",
              parameter.sizes(), ", ", problem);
}

/// Puts each parameter into its unit.
void assign(const torch::nn::Module& module, std::vector<FoundUnits::Found>& units) {
  std::unordered_map<const void*, std::pair<std::string, size_t>> places;  // of storages
  std::unordered_map<const void*, bool> taken;
  for (const auto& item : module.named_parameters()) {
    const at::Tensor& parameter = item.value();
    if (!parameter.defined()) continue;
    check_parameter(item.key(), parameter);
    const auto unit = std::find_if(units.begin(), units.end(), [&](const FoundUnits::Found& one) {
      return one.layer == nullptr || is_within(item.key(), one.name);
    });
    const auto number = static_cast<size_t>(unit - units.begin());
    const bool is_new = taken.emplace(parameter.unsafeGetTensorImpl(), true).second;
    // All parameters of a unit that was made early lie in one storage.
    const bool is_early = unit->layer != nullptr && unit->layer->early() != nullptr;
    TORCH_CHECK(is_early || parameter.numel() == 0 || has_memory(parameter.storage()),
                "FullyShardedDataParallel: ", item.key(),
                " has no values: another FullyShardedDataParallel holds them, or held them when it was destroyed; "
                "construct the module again, and load a saved state");
    const void* memory = parameter.storage().unsafeGetStorageImpl();
    const auto [place, is_alone] =
        places.try_emplace(is_early ? parameter.unsafeGetTensorImpl() : memory, item.key(), number);
    TORCH_CHECK(is_alone || (!is_new && place->second.second == number),
                "FullyShardedDataParallel: ", place->second.first, " and ", item.key(), " lie in the same memory and ",
                is_new ? "are two tensors" : "belong to different units",
                "; give each its own, or register one tensor twice within one unit or outside of all");
    if (!is_new) continue;
    if (!unit->parameters.empty())
      TORCH_CHECK(unit->parameters.front().second.scalar_type() == parameter.scalar_type(),
                  "FullyShardedDataParallel: ", unit->parameters.front().first, " is a ",
                  unit->parameters.front().second.toString(), " and ", item.key(), " of the same unit a ",
                  parameter.toString(), "; parameters of one unit have one dtype");
    unit->parameters.emplace_back(item.key(), parameter);
  }
}

FoundUnits found_in(const torch::nn::Module& module) {
  const auto buffers = module.named_buffers();
  TORCH_CHECK(buffers.is_empty(), "FullyShardedDataParallel: the module has the buffer ",
              buffers.is_empty() ? "" : buffers.front().key(),
              ", and it does not synchronise buffers (batch norms, running statistics); keep constants as member "
              "tensors that are not registered, or use DistributedDataParallel");
  FoundUnits found{.units = layers_in(module)};
  found.units.push_back({.name = kRest, .layer = nullptr, .parameters = {}});
  assign(module, found.units);
  if (found.units.back().parameters.empty()) found.units.pop_back();
  for (const FoundUnits::Found& unit : found.units)
    TORCH_CHECK(!unit.parameters.empty(), "FullyShardedDataParallel: ", unit.name,
                " has no parameters, so there is nothing to gather; make it a plain layer");
  return found;
}

}  // namespace

NamedTensors parameters_of_unit(const torch::nn::Module& layer, const std::string& name, const Group& group) {
  NamedTensors parameters;
  on_all_ranks(group, [&] {
    for (const auto& item : layer.named_modules("", /*include_self=*/false))
      TORCH_CHECK(dynamic_cast<const detail::UnitBase*>(item.value().get()) == nullptr, "ShardedInitialization: ", name,
                  " has ", item.key(), ", another ShardedUnit; make one of them a plain layer");
    std::unordered_map<const void*, std::string> names;  // of storages
    for (const auto& item : layer.named_parameters()) {
      const at::Tensor& parameter = item.value();
      if (!parameter.defined()) continue;
      check_parameter(item.key(), parameter);
      TORCH_CHECK(parameters.empty() || parameters.front().second.scalar_type() == parameter.scalar_type(),
                  "ShardedInitialization: the parameters of ", name, " have several dtypes; give them one");
      const auto [other, is_new] = names.emplace(parameter.storage().unsafeGetStorageImpl(), item.key());
      TORCH_CHECK(is_new, "ShardedInitialization: ", other->second, " and ", item.key(), " of ", name,
                  " lie in the same memory; give each its own");
      parameters.emplace_back(item.key(), parameter);
    }
    TORCH_CHECK(!parameters.empty(), "ShardedInitialization: ", name,
                " has no parameters, so there is nothing to gather; make it a plain layer");
  });
  check_same_on_all_ranks(
      group, "parameter", parameters, [](const at::Tensor&) { return std::string(); }, kBeforeSharding);
  return parameters;
}

FoundUnits find_units(const torch::nn::Module& module, const Group& group) {
  const OperationLabel label("the units of a FullyShardedDataParallel");
  FoundUnits found;
  on_all_ranks(group, [&] { found = found_in(module); });
  NamedTensors all;
  std::string names;
  for (const FoundUnits::Found& unit : found.units) {
    names += unit.name + (unit.layer && unit.layer->early() ? " of a ShardedInitialization\n" : "\n");
    all.insert(all.end(), unit.parameters.begin(), unit.parameters.end());
  }
  check_same_on_all_ranks(group, "unit", names, kBeforeSharding);
  check_same_on_all_ranks(
      group, "parameter", all, [](const at::Tensor&) { return std::string(); }, kBeforeSharding);
  return found;
}

}  // namespace lockstep::fully_sharded
