#pragma once

#include <array>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <lockstep/zero_redundancy_optimizer.h>

#include "collectives/machine_memory.h"
#include "data_parallel/replica_state.h"
#include "optim/step_plan.h"

namespace lockstep::detail {

/// A step that the ranks of one machine share out.
///
/// Parameters of one dtype lie side by side in an area, each at 64 bytes or a multiple, on every rank or once for all;
/// rank r of N steps the r-th N-th of each area, and writes what comes of it into all copies. What is remembered of the
/// parameters lies in arrays like the area, which all ranks map; the optimizer's own map holds views of them.
///
/// In a step the ranks first tell each other what they are about to do, so nobody still reads parameters when they are
/// written, and in the end wait for each other, so everybody has all of them.
class ShardedStep {
 public:
  /// Every rank makes it. `model` outlives it.
  ShardedStep(const Replica& model, const torch::optim::Optimizer& optimizer, FormulaKind kind,
              ZeroRedundancyOptions options);
  /// Gives the parameters memory of their own again.
  ~ShardedStep();
  ShardedStep(const ShardedStep&) = delete;
  ShardedStep& operator=(const ShardedStep&) = delete;

  /// Every rank calls it, with the optimizer that it was made for.
  void step(torch::optim::Optimizer& optimizer);

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    size_t area;
    int64_t offset;   ///< in the area
    at::Tensor here;  ///< its view of the area
  };
  struct Area {
    at::ScalarType dtype;
    bool masters;
    int64_t elements = 0;
    at::Tensor parameters;             ///< [elements]
    std::vector<std::byte*> others;    ///< where it lies on the other ranks; empty where it is shared
    std::array<at::Tensor, 3> arrays;  ///< of the state, [elements] each; undefined until the first is needed
    at::Tensor master;
  };

  void find_parameters(const torch::optim::Optimizer& optimizer, const NamedTensors& trained);
  void move_in(size_t area);
  /// What keeps this rank from stepping; empty if nothing does.
  std::string trouble(const torch::optim::Optimizer& optimizer) const;
  /// Throws on all ranks if one of them is in trouble or about to do something else than the others.
  void agree(const std::string& trouble, const std::vector<optim::Intent>& intents) const;
  optim::Plan plan(torch::optim::Optimizer& optimizer, const optim::Intent& intent);
  /// The view of `array` that belongs to a parameter; takes over what `held` has, this rank's slice of it.
  at::Tensor adopt(at::Tensor& array, const Parameter& parameter, const at::Tensor& held, at::ScalarType dtype);
  /// [begin, end) of a parameter's elements that this rank steps.
  std::pair<int64_t, int64_t> slice_of(const Parameter& parameter) const;

  const ReplicaState& model_;
  const Formula& formula_;
  const ZeroRedundancyOptions options_;
  const Group group_;
  MachineMemory& memory_;
  std::vector<Parameter> parameters_;
  std::vector<Area> areas_;
  std::unordered_map<const c10::TensorImpl*, size_t> places_;  ///< in parameters_
};

}  // namespace lockstep::detail
