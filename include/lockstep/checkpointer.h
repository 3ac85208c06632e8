#pragma once

#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <lockstep/checkpoint.h>
#include <lockstep/group.h>
#include <lockstep/has_state.h>

namespace lockstep {

class Replica;
namespace detail {
/// The ranks that have a replica, by their numbers among all ranks.
std::vector<int> ranks_of_replicas(const Replica& model);
}  // namespace detail

struct CheckpointerOptions {
  /// Save when this many steps have been made since the last checkpoint. Unset: not by steps.
  std::optional<int64_t> every_steps{};
  /// Save when this many minutes have passed on rank 0. Unset: not by time.
  std::optional<double> every_minutes{};
  /// Checkpoints to keep: the newest, and those with the best score.
  int keep_last = 2;
  int keep_best = 1;
  bool higher_is_better = true;
  /// Write on a thread, from a copy of the state. Training stops only for the copy, which takes as much memory as the
  /// state.
  bool asynchronous = true;
  /// Save to the launcher's memory every so many steps, for ranks that the launcher restarts (docs/elasticity.md).
  std::optional<int64_t> memory_every_n_steps{};
  /// If no launcher has such memory, or it is too small, warn and save only to disk. False: throw Error.
  bool disk_if_no_memory = false;
  /// For a run that does not resume: its first step() or save() removes the checkpoints that another run left in the
  /// folder. False: they stay, and because they would pass for the newest, saves are refused until this run's steps are
  /// above theirs.
  bool replace_old_run = false;
};

/// Saves training state at intervals, and resumes from the newest intact checkpoint.
///
///     lockstep::Checkpointer checkpointer(run_dir, context.group(), {.every_minutes = 10});
///     checkpointer.add("model", model).add("optimizer", optimizer).add("loader", train).add("best", best);
///     checkpointer.resume();                       // false: there is nothing to resume
///     for (int epoch : train.epochs(10))           // resumes within the epoch
///       for (auto& [data, target] : train) {
///         ...
///         optimizer.step();
///         checkpointer.step(++step);               // saves if it is due; this batch counts as done
///       }
///     checkpointer.finish();
///
/// Each checkpoint is a file that Python's torch.load reads, {"model": ..., "optimizer": ..., "step": ...}, with a
/// manifest that holds its hash (docs/checkpoints.md). Rank 0 writes the state that all ranks have in common, after
/// comparing it, and the state of each rank: its random state and parts added as kEachRank. A different number of ranks
/// resumes only the common state, with a warning, and parts that can convert theirs, such as a communication hook.
///
/// All ranks must make the same calls in the same order: all but `add` are collectives. All ranks must see the folder.
/// Used by one thread. Objects that were added must outlive it, and other threads must not change them during a call.
///
/// A full or failing disk does not stop training: rank 0 warns by TORCH_WARN, and earlier checkpoints remain. finish()
/// throws if the last save failed.
class Checkpointer {
 public:
  enum class Scope {
    kAllRanks,  ///< equal on all ranks, bit for bit: each save compares hashes, and throws Error on all if they differ
    kEachRank,  ///< each rank's own
    kRankZero,  ///< rank 0's, whatever the others have; all ranks get it on resume
  };
  /// Functions that get and set a state.
  struct Part {
    std::function<c10::IValue()> save;
    std::function<void(const c10::IValue&)> load;
    /// For kEachRank on a different number of ranks: receives the states of all ranks that saved, in rank order. Null:
    /// the part is not resumed then.
    std::function<void(const std::vector<c10::IValue>&)> load_from_ranks = nullptr;
    /// For kEachRank on as many ranks: whether the ranks are where those were that saved a state. The answer is the
    /// same on all ranks; if it is no, they resume as a different number of ranks. Null: yes.
    std::function<bool(const c10::IValue&)> fits_ranks = nullptr;
  };

  /// Rank 0 makes `folder`, which belongs to this run alone. Throws Error on all ranks if it cannot be made, if it
  /// cannot be written while saves by steps or minutes are enabled, or if options, or folders on a machine, differ by
  /// rank.
  Checkpointer(const std::string& folder, Group group, CheckpointerOptions options = {});
  /// Waits until the current write is done.
  ~Checkpointer();
  Checkpointer(const Checkpointer&) = delete;
  Checkpointer& operator=(const Checkpointer&) = delete;

  /// TORCH_CHECK fails for a name that is taken or reserved ("step", "ranks").
  Checkpointer& add(const std::string& name, Part part, Scope scope = Scope::kAllRanks);
  /// Use kEachRank if ranks hold different weights for a while, as between the averages of post-local SGD. Use
  /// kRankZero if only buffers differ, such as running statistics of batch norm that each rank keeps for itself.
  Checkpointer& add(const std::string& name, torch::nn::Module& module, Scope scope = Scope::kAllRanks);
  Checkpointer& add(const std::string& name, torch::optim::Optimizer& optimizer, Scope scope = Scope::kAllRanks);
  /// The module of `model`, whose replicas are compared before each save (model.check_divergence()): a checkpoint holds
  /// rank 0's model, which must equal all others. If replicas may differ between steps, or are on some of the
  /// checkpointer's ranks only, which save() and resume() refuse, add the module itself with another scope. Rank 0
  /// warns if the same number of ranks resumes with another model.accumulate(n) than the checkpoint's: unless batches
  /// have changed too, steps then consist of other samples.
  template <HasReplicas T>
  Checkpointer& add(const std::string& name, T& model) {
    std::vector<int> ranks;
    if constexpr (std::derived_from<T, Replica>) ranks = detail::ranks_of_replicas(model);
    add_replicas(
        name, *model.operator->(), model.parameters_to_ignore(), [&model] { return model.last_accumulation(); },
        std::move(ranks));
    return check_before_saves([&model] { model.check_divergence(); });
  }
  /// A FullyShardedDataParallel. Saves to disk are then written piece by piece before step() or save() returns,
  /// whatever `asynchronous` says, since no rank has memory for the whole.
  Checkpointer& add(const std::string& name, detail::StateInSlices& model);
  /// TORCH_CHECK fails for another scope than kEachRank if T has load_from_ranks().
  template <detail::HasStateAlone T>
  Checkpointer& add(const std::string& name, T& thing,
                    Scope scope = HasStateOfRanks<T> ? Scope::kEachRank : Scope::kAllRanks);
  /// A number or string of the program. resume() throws Error for a number that does not fit the variable.
  template <typename T>
  requires(std::is_arithmetic_v<T> || std::same_as<T, std::string>) Checkpointer& add(const std::string& name, T& value,
                                                                                      Scope scope = Scope::kAllRanks);

  /// Every rank calls `check` before each save. If it throws, nothing is saved.
  /// REQUIRES: it then throws on all ranks.
  Checkpointer& check_before_saves(std::function<void()> check);

  /// Loads the newest intact checkpoint, in memory or on disk; damaged ones are skipped with a warning. Returns false,
  /// and changes nothing, if there is none. Throws Error on all ranks if the checkpoint belongs to another program,
  /// listing everything that does not fit, and if there are checkpoints but none is intact. Parts that were loaded
  /// before an error stay loaded.
  bool resume();
  /// The step of the checkpoint that was resumed, or 0.
  int64_t resumed_step() const;

  /// Call it after every step. Saves to memory and to disk where that is due; returns whether it saved to disk. With
  /// every_minutes it asks rank 0 about once a second, or ten times per interval if that is shorter. Throws Error for a
  /// step below 0, and for one that is not above the steps that another run left in the folder.
  bool step(int64_t step);
  /// Saves now. After resume(), rank 0 warns once of each object that the training uses and nobody saves, such as an
  /// Ema, because a resumed run would begin it anew (docs/checkpoints.md). `score` rates the checkpoint, for keep_best;
  /// a score that is not finite warns and counts as none. Throws Error on all ranks if the state cannot be obtained; if
  /// it differs where it should be equal (naming the tensor and the rank); if ranks have different steps, scores or
  /// parts; while the model has averaged weights; and if the step is below this run's last save, or not above the steps
  /// that another run left in the folder. Disk failures are warnings.
  void save(int64_t step, std::optional<double> score = {});
  /// Waits until everything is written. Throws Error on all ranks if the last save failed.
  void finish();

 private:
  Checkpointer& add_replicas(const std::string& name, torch::nn::Module& module,
                             const std::vector<std::string>& ignored, std::function<int()> accumulation,
                             std::vector<int> ranks);

  struct State;
  std::unique_ptr<State> state_;
};

template <detail::HasStateAlone T>
Checkpointer& Checkpointer::add(const std::string& name, T& thing, Scope scope) {
  constexpr bool kIsStateDict = std::same_as<decltype(thing.state_dict()), StateDict>;
  Part part;
  if constexpr (kIsStateDict) {
    part.save = [&thing] { return to_object(thing.state_dict()); };
    part.load = [&thing](const c10::IValue& state) { thing.load_state_dict(to_state_dict(state)); };
  } else {
    part.save = [&thing] { return c10::IValue(thing.state_dict()); };
    part.load = [&thing](const c10::IValue& state) { thing.load_state_dict(state); };
  }
  if constexpr (HasStateOfRanks<T>) {
    TORCH_CHECK(scope == Scope::kEachRank, "Checkpointer: each rank has its own state of `", name,
                "`; add it without a scope, or with Scope::kEachRank");
    part.load_from_ranks = [&thing](const std::vector<c10::IValue>& states) {
      std::vector<StateDict> ranks;
      for (const c10::IValue& state : states) ranks.push_back(to_state_dict(state));
      thing.load_from_ranks(ranks);
    };
    if constexpr (requires(const StateDict& state) { thing.fits_ranks(state); })
      part.fits_ranks = [&thing](const c10::IValue& state) { return thing.fits_ranks(to_state_dict(state)); };
  }
  return add(name, std::move(part), scope);
}

template <typename T>
requires(std::is_arithmetic_v<T> ||
         std::same_as<T, std::string>) Checkpointer& Checkpointer::add(const std::string& name, T& value, Scope scope) {
  return add(name,
             Part{.save = [&value] { return detail::saved_value(value); },
                  .load = [&value](const c10::IValue& state) { detail::load_value(state, value); }},
             scope);
}

}  // namespace lockstep
