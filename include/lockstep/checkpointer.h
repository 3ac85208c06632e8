#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <lockstep/checkpoint.h>
#include <lockstep/group.h>

namespace lockstep {

struct CheckpointerOptions {
  /// Save when this many steps were made since the last checkpoint. Unset: not by steps.
  std::optional<int64_t> every_steps;
  /// Save when this many minutes have passed on rank 0. Unset: not by time.
  std::optional<double> every_minutes;
  /// Checkpoints to keep: the newest, and those with the best score.
  int keep_last = 2;
  int keep_best = 1;
  bool higher_is_better = true;
  /// Write on a thread, from a copy of the state: training stops for the copy alone. Takes the state's memory once
  /// more.
  bool asynchronous = true;
};

/// Something whose state is in a checkpoint: `thing.state_dict()` gives a StateDict or an IValue,
/// `thing.load_state_dict(...)` takes it. A DataLoader is one.
template <typename T>
concept HasState = requires(T& thing) {
  thing.load_state_dict(thing.state_dict());
  requires std::convertible_to<decltype(thing.state_dict()), c10::IValue> ||
      std::same_as<decltype(thing.state_dict()), StateDict>;
};

/// DistributedDataParallel of an nn::Module.
template <typename T>
concept HasReplicas = requires(T& model) {
  model.check_divergence();
  { *model.operator->() } -> std::convertible_to<torch::nn::Module&>;
};

/// Something of which each rank remembers a part of its own, and which knows what to make of the parts of another
/// number of ranks. A CommHook is one.
template <typename T>
concept HasStateOfRanks = HasState<T> && requires(T& thing, const std::vector<StateDict>& ranks) {
  thing.load_from_ranks(ranks);
};

/// Saves a training now and then, and goes on from the newest checkpoint that is whole.
///
///     lockstep::Checkpointer checkpointer(run_dir, context.group(), {.every_minutes = 10});
///     checkpointer.add("model", model).add("optimizer", optimizer).add("loader", train).add("best", best);
///     checkpointer.resume();                       // false: nothing to resume, start anew
///     for (int epoch : train.epochs(10))           // goes on within the epoch
///       for (auto& [data, target] : train) {
///         ...
///         optimizer.step();
///         checkpointer.step(++step);               // saves if it is due; this batch counts as done
///       }
///     checkpointer.finish();
///
/// A checkpoint is a file of its own that Python's torch.load reads, {"model": ..., "optimizer": ..., "step": ...},
/// beside a manifest with its hash; docs/checkpoints.md. Rank 0 writes what all ranks have in common, which is compared
/// first, and with it what each rank has of its own: its random state, and parts added as kEachRank. On another number
/// of ranks the former is resumed, the latter not, which is said; but for what knows what to do then, such as a
/// communication hook.
///
/// All ranks make the same calls in the same order: all but `add` are collectives. The folder must be one that all
/// ranks see. Used by one thread; what was added must outlive it, and must not be changed by others during a call.
///
/// A disk that is full or fails does not stop training: it is said by TORCH_WARN on rank 0, and the checkpoints that
/// were there stay. finish() throws if the last save failed.
class Checkpointer {
 public:
  enum class Scope {
    kAllRanks,  ///< the same on all ranks, to the bit: each save compares hashes, and throws Error on all if it is not
    kEachRank,  ///< each rank's own
    kRankZero,  ///< rank 0's, whatever the others have; all get it when they resume
  };
  /// How to get and set a state.
  struct Part {
    std::function<c10::IValue()> save;
    std::function<void(const c10::IValue&)> load;
    /// kEachRank, on another number of ranks: gets what each of those that saved had, in their order. Null: it is not
    /// resumed then.
    std::function<void(const std::vector<c10::IValue>&)> load_from_ranks = nullptr;
  };

  /// `folder` need not be there; rank 0 makes it. It belongs to this run alone. Throws Error on all ranks if it cannot
  /// be made, or not be written although saves by steps or minutes are wanted.
  Checkpointer(std::string folder, Group group, CheckpointerOptions options = {});
  /// Waits until what is being written is written.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// TORCH_CHECK fails for a name that is there, or is one of our own: "step", "ranks".
  Checkpointer& add(const std::string& name, Part part, Scope scope = Scope::kAllRanks);
  /// kEachRank where ranks hold different weights for a while: between the averages of post-local SGD. kRankZero where
  /// only buffers differ, such as the running statistics of batch norm that each rank has of its own.
  Checkpointer& add(const std::string& name, torch::nn::Module& module, Scope scope = Scope::kAllRanks);
  Checkpointer& add(const std::string& name, torch::optim::Optimizer& optimizer, Scope scope = Scope::kAllRanks);
  /// The module of `model`, whose replicas are compared before each save (model.check_divergence()): a checkpoint is
  /// rank 0's model, so it must be that of all. Where replicas may differ between steps add the module itself with
  /// another scope.
  template <HasReplicas T>
  Checkpointer& add(const std::string& name, T& model) {
    add(name, *model.operator->(), Scope::kRankZero);
    return check_before_saves([&model] { model.check_divergence(); });
  }
  template <HasState T>
  requires(!std::derived_from<T, torch::nn::Module> && !std::derived_from<T, torch::optim::Optimizer>)
      Checkpointer& add(const std::string& name, T& thing,
                        Scope scope = HasStateOfRanks<T> ? Scope::kEachRank : Scope::kAllRanks);
  /// A number or text of the program's.
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::same_as<T, std::string>) Checkpointer& add(const std::string& name, T& value,
                                                                                      Scope scope = Scope::kAllRanks);

  /// `check` is called before each save on every rank. If it throws, as it then must on all ranks, nothing is saved.
  Checkpointer& check_before_saves(std::function<void()> check);

  /// Loads the newest checkpoint that is whole; damaged ones are passed over with a warning. False, and nothing
  /// changed, where there is none. Throws Error on all ranks, listing all that does not fit, for one of another
  /// program; also where checkpoints are there, but none is whole. What was loaded before an error stays.
  bool resume();
  /// The step of the checkpoint that was resumed, else 0.
  int64_t resumed_step() const;

  /// After every step: saves if it is due. Returns whether it did. With every_minutes it asks rank 0 about once a
  /// second, or ten times in that time if it is shorter.
  bool step(int64_t step);
  /// Saves now. `score` says how good it is, for keep_best. Throws Error on all ranks if the state cannot be had, or
  /// is not the same where it should be: it names the tensor and the rank. Failures of the disk are warnings.
  void save(int64_t step, std::optional<double> score = {});
  /// Waits until all is written. Throws Error on all ranks if the last save failed.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <HasState T>
requires(!std::derived_from<T, torch::nn::Module> &&
         !std::derived_from<T, torch::optim::Optimizer>) Checkpointer& Checkpointer::add(const std::string& name,
                                                                                         T& thing, Scope scope) {
  constexpr bool kIsStateDict = std::same_as<decltype(thing.state_dict()), StateDict>;
  Part part;
  if constexpr (kIsStateDict) {
    part.save = [&thing] { return to_object(thing.state_dict()); };
    part.load = [&thing](const c10::IValue& state) { thing.load_state_dict(to_state_dict(state)); };
  } else {
    part.save = [&thing] { return c10::IValue(thing.state_dict()); };
    part.load = [&thing](const c10::IValue& state) { thing.load_state_dict(state); };
  }
  if constexpr (HasStateOfRanks<T>)
    part.load_from_ranks = [&thing](const std::vector<c10::IValue>& states) {
      std::vector<StateDict> ranks;
      for (const c10::IValue& state : states) ranks.push_back(to_state_dict(state));
      thing.load_from_ranks(ranks);
    };
  return add(name, std::move(part), scope);
}

template <typename T>
requires(std::is_arithmetic_v<T> ||
         std::same_as<T, std::string>) Checkpointer& Checkpointer::add(const std::string& name, T& value, Scope scope) {
  Part part;
  if constexpr (std::same_as<T, std::string>) {
    part.save = [&value] { return c10::IValue(value); };
    part.load = [&value](const c10::IValue& state) { value = state.toStringRef(); };
  } else if constexpr (std::same_as<T, bool>) {
    part.save = [&value] { return c10::IValue(value); };
    part.load = [&value](const c10::IValue& state) { value = state.toBool(); };
  } else if constexpr (std::is_floating_point_v<T>) {
    part.save = [&value] { return c10::IValue(static_cast<double>(value)); };
    part.load = [&value](const c10::IValue& state) { value = static_cast<T>(state.toDouble()); };
  } else {
    part.save = [&value] { return c10::IValue(static_cast<int64_t>(value)); };
    part.load = [&value](const c10::IValue& state) { value = static_cast<T>(state.toInt()); };
  }
  return add(name, std::move(part), scope);
}

}  // namespace lockstep
