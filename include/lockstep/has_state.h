#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <lockstep/state_dict.h>
#include <lockstep/state_in_slices.h>

namespace lockstep {

/// An object whose state can be in a checkpoint: `thing.state_dict()` gives a StateDict or an IValue, and
/// `thing.load_state_dict(...)` takes it. Example: DataLoader.
template <typename T>
concept HasState = requires(T& thing) {
  thing.load_state_dict(thing.state_dict());
  requires std::convertible_to<decltype(thing.state_dict()), c10::IValue> ||
      std::same_as<decltype(thing.state_dict()), StateDict>;
};

/// A DistributedDataParallel of an nn::Module.
template <typename T>
concept HasReplicas = requires(T& model) {
  model.check_divergence();
  { *model.operator->() } -> std::convertible_to<torch::nn::Module&>;
  { model.parameters_to_ignore() } -> std::convertible_to<std::vector<std::string>>;
  { model.last_accumulation() } -> std::convertible_to<int>;
};

/// An object with a separate state on each rank that can use the states of a different number of ranks. Example:
/// CommHook.
template <typename T>
concept HasStateOfRanks = HasState<T> && requires(T& thing, const std::vector<StateDict>& ranks) {
  thing.load_from_ranks(ranks);
};

namespace detail {

/// An object that a Checkpointer saves by its state alone.
template <typename T>
concept HasStateAlone = HasState<T> && !std::derived_from<T, torch::nn::Module> &&
                        !std::derived_from<T, torch::optim::Optimizer> && !std::derived_from<T, StateInSlices>;

}  // namespace detail
}  // namespace lockstep
