#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace lockstep::fully_sharded {

/// The units of a module.
struct FoundUnits {
  struct Found {
    std::string name;
    detail::UnitBase* layer;  ///< null: the remaining parameters
    NamedTensors parameters;
  };
  std::vector<Found> units;  ///< the remaining parameters, if any, are the last unit
};

/// The parameters of a layer that is to be a unit; messages call it `name`. Throws on all ranks if it cannot be one, or
/// if the ranks' layers differ.
/// REQUIRES: every rank calls it.
NamedTensors parameters_of_unit(const torch::nn::Module& layer, const std::string& name, const Group& group);

/// Finds the units. Throws on all ranks if the module cannot be sharded, or if the ranks' modules differ.
/// REQUIRES: every rank calls it.
FoundUnits find_units(const torch::nn::Module& module, const Group& group);

}  // namespace lockstep::fully_sharded
