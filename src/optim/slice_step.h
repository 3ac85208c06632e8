#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include <lockstep/zero_redundancy_optimizer.h>

#include "data_parallel/replica_state.h"
#include "optim/areas.h"
#include "optim/own_step.h"
#include "optim/parameter_watch.h"

namespace lockstep::detail {

/// A step that ranks share out although only the optimizer's own step() knows what to do: on each rank that steps its
/// slices of the areas (OwnStep). Backward reduces the gradients. Afterwards the slices reach all ranks: through shared
/// memory, or by an all_gather.
class SliceStep final : public SharedStep {
 public:
  /// Every rank makes it. `model` outlives it.
  SliceStep(const Replica& model, torch::optim::Optimizer& optimizer, bool state_is_known,
            const ZeroRedundancyOptions& options);
  ~SliceStep() override;

  void backward_begins(bool gradients_wait) override { watch_.backward_begins(gradients_wait); }

  /// Every rank calls it, with what steps the parameters in the optimizer's groups.
  void step(const std::function<void()>& own_step);
  /// TORCH_CHECK fails where only the optimizer knows what it remembers.
  void check_state_is_known() const;
  /// Makes the views in the optimizer's map whole, until the next step. Every rank calls it where ranks share no
  /// memory.
  void complete();
  /// Null where each rank reaches all of the state.
  const Group* slice_holders() const { return areas_.memory() == nullptr ? &group_ : nullptr; }
  /// The optimizer was moved.
  void move_to(torch::optim::Optimizer& optimizer) { optimizer_ = &optimizer; }

 private:
  std::string trouble(const torch::optim::Optimizer& optimizer) const;
  /// Throws on all ranks if one of them is in trouble or about to do something else than the others.
  void agree(const std::string& trouble, const torch::optim::Optimizer& optimizer) const;
  /// What is about to be stepped, at which rates and from which state.
  uint64_t hash_of_step(const torch::optim::Optimizer& optimizer) const;
  /// Of what options of an unknown optimizer tell of themselves. `all`: not only the rate.
  static uint64_t hash_of_options(const torch::optim::OptimizerOptions& options, bool all);

  /// This rank's slices reach all ranks, and theirs this one.
  void spread() const;

  ReplicaState& model_;
  const std::weak_ptr<const bool> model_is_there_;
  const Group group_;
  torch::optim::Optimizer* optimizer_;
  Areas areas_;
  std::mutex stepping_;  ///< held by the thread that steps
  OwnStep slices_;
  ParameterWatch watch_;
  int64_t steps_ = 0;  ///< that were begun
};

}  // namespace lockstep::detail
