#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace lockstep::fully_sharded {

/// What a module's units are.
struct FoundUnits {
  struct Found {
    std::string name;
    detail::UnitBase* layer;  ///< null: the rest
    NamedTensors parameters;
  };
  std::vector<Found> units;  ///< the rest, if there is one, is the last
};

/// The parameters of a layer that is to be a unit, called `name` in messages. Throws on all ranks if it cannot be one,
/// or the ranks' layers differ. Every rank calls it.
NamedTensors parameters_of_unit(const torch::nn::Module& layer, const std::string& name, const Group& group);

/// Throws on all ranks if the module is none that can be sharded, or the ranks' modules differ. Every rank calls it.
FoundUnits find_units(const torch::nn::Module& module, const Group& group);

}  // namespace lockstep::fully_sharded
