#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include <lockstep/state_dict.h>
#include <lockstep/state_in_slices.h>
#include <torch/nn/module.h>

#include "fully_sharded/edit_check.h"
#include "fully_sharded/gathering.h"
#include "fully_sharded/machine_groups.h"
#include "fully_sharded/part_states.h"
#include "fully_sharded/unit.h"

namespace lockstep::fully_sharded {

/// The parameters of a FullyShardedDataParallel as its state: read, saved and replaced. Callers have made sure that all
/// ranks are at the same call, between two backwards.
class Contents {
 public:
  /// Everything outlives the object.
  Contents(const torch::nn::Module& module, const MachineGroups& groups, std::deque<Unit>& units,
           const EditCheck& edits, Gathering& gathering)
      : module_(module), groups_(groups), units_(units), edits_(edits), gathering_(gathering) {}

  /// Calls `visit` on rank 0 with each parameter of the module, gathered unit by unit.
  /// REQUIRES: every rank calls it.
  void read_all(const std::function<void(const std::string& name, const at::Tensor& value)>& visit);
  /// The parameters, in memory of which this rank has its slices.
  StateDict in_slices() const;
  /// Those of a state's elements that load() reads on this rank.
  std::vector<detail::ElementRange> elements_to_load(const StateDict& state) const;
  /// For an optimizer of the parts.
  PartStates::Places part_places() const;
  /// Throws RefusedInput on all ranks, and changes nothing, if the state does not fit the module or differs by rank.
  /// REQUIRES: every rank calls it.
  void load(const StateDict& state);

 private:
  const torch::nn::Module& module_;
  const MachineGroups& groups_;
  std::deque<Unit>& units_;
  const EditCheck& edits_;
  Gathering& gathering_;
};

}  // namespace lockstep::fully_sharded
