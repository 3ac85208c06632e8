#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/optimizer_kind.h"
#include "data_parallel/replica_state.h"
#include "optim/areas.h"

namespace lockstep::detail {

/// A step that ranks share out although only the optimizer's own step() knows what to do: on each rank that steps its
/// slices of the areas. Backward reduces the gradients.
///
/// For the step, parts of parameters that lie in this rank's slice take the parameters' places in the optimizer's
/// groups, flat, with the same part of .grad. Afterwards the slices reach all ranks: through shared memory, or by an
/// all_gather. Where it is known what is remembered of parameters, the optimizer's map holds views of the areas' arrays
/// between steps. What an unknown optimizer remembers belongs to its slices.
class SliceStep {
 public:
  /// Every rank makes it. `model` outlives it.
  SliceStep(const Replica& model, const torch::optim::Optimizer& optimizer, bool state_is_known,
            const ZeroRedundancyOptions& options);
  SliceStep(const SliceStep&) = delete;
  SliceStep& operator=(const SliceStep&) = delete;

  /// Every rank calls it, with the optimizer that it was made for, and what steps the parameters in its groups.
  void step(torch::optim::Optimizer& optimizer, const std::function<void()>& own_step);
  /// TORCH_CHECK fails where only the optimizer knows what it remembers.
  void check_state_is_known() const;
  /// Makes the views in the optimizer's map whole, until the next step. Every rank calls it where ranks share no
  /// memory.
  void complete();
  /// Null where each rank reaches all of the state.
  const Group* slice_holders() const { return areas_.memory() == nullptr ? &group_ : nullptr; }

 private:
  /// Of a parameter in areas_, at the same place.
  struct Slice {
    at::Tensor tensor;        ///< this rank's part of the parameter, flat
    bool is_stepped = false;  ///< in the present step
  };
  class Exchanged;

  std::string trouble(const torch::optim::Optimizer& optimizer) const;
  /// Throws on all ranks if one of them is in trouble or about to do something else than the others.
  void agree(const std::string& trouble, const torch::optim::Optimizer& optimizer) const;
  /// What is about to be stepped, at which rates and from which state.
  uint64_t hash_of_step(const torch::optim::Optimizer& optimizer) const;

  void bring_gradient(size_t place);
  void bring_state(torch::optim::Optimizer& optimizer, size_t place);
  void take_state(torch::optim::Optimizer& optimizer, size_t place);
  /// This rank's slices reach all ranks, and theirs this one.
  void spread() const;

  const ReplicaState& model_;
  const Group group_;
  const std::optional<OptimizerKind> kind_;  ///< what is remembered, if that is known
  Areas areas_;
  std::vector<Slice> slices_;
};

}  // namespace lockstep::detail
