#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/group.h>

namespace lockstep {

class VirtualRanks;
struct AdoptedRanks;

struct ContextOptions {
  /// Seeds torch's generator with `seed + rank` on every rank (with virtual ranks: docs/exactness.md). The same on all
  /// ranks, or Error. Unset: torch's own default.
  std::optional<uint64_t> seed{};
  /// Every rank is seeded with `seed` at first, so that all draw the same problem and the same weights, and with
  /// `seed + rank` when the loop begins: at the first training pass of a loader (one without `exactly_once`) or the
  /// first backward of a DistributedDataParallel. Needs a seed. A resumed state of the generator takes its place. The
  /// same on all ranks, or Error. With virtual ranks it is so without this option.
  bool same_seed_until_loop = false;
  /// The number of virtual ranks: the run then gives the same bits on any number of ranks up to this one
  /// (docs/exactness.md). Each rank works for a block of them in turn, and a step takes one micro-batch of each. 0: the
  /// environment's number, else none (docs/environment.md). Fewer than ranks are an Error.
  int virtual_ranks = 0;
  /// Threads that one of torch's operators uses. 0: this rank's share of the cores or, with virtual ranks, 1, because
  /// results depend on it. The environment may override it.
  int threads = 0;
  /// The time to wait for all ranks to join. The environment may override it (docs/environment.md).
  std::chrono::milliseconds join_timeout = std::chrono::seconds(120);
  /// The time after which a collective fails, and so the longest time that a rank may work alone, for example evaluate,
  /// while the others wait for it. Half an hour, as in PyTorch; `lockstep run` finds ranks that hang sooner
  /// (docs/launcher.md).
  std::chrono::milliseconds collective_timeout = std::chrono::minutes(30);
  /// The engine of the collectives; docs/backends.md names them. Empty: "shm" (shared memory) if all ranks are on one
  /// machine, "hierarchical" if several machines have several ranks, else an engine that works over the network alone.
  /// An engine that cannot serve these ranks is an Error on all of them.
  std::string backend{};
  /// Whether rank 0 prints to stderr, once, how the world was formed.
  bool announce = true;
  /// Whether Context(argc, argv) obeys `--ranks N`.
  bool ranks_argument = true;
};

/// The exit code of a program that was asked to stop and has saved its state (Context::stop_requested).
inline constexpr int kPreempted = 60;

/// This process's place among the ranks of the run. Constructing it joins them; destroying it leaves.
///
/// The environment says where the ranks come from. The first of these that is present counts: `lockstep run`, torchrun
/// (or its variables, set by hand), Open MPI, MPICH, Slurm; else it is a world of one. docs/environment.md names the
/// variables; mpi.h makes one of an MPI communicator. A world that is announced but cannot be formed is an Error on
/// every rank that notices, never a smaller world.
///
/// Every rank must construct one, and may construct another after it has been destroyed; two at once are an Error.
/// Blocks until all ranks have joined or `join_timeout` has passed. The destructor waits for the others for a few
/// seconds, but not during stack unwinding.
class Context {
 public:
  /// If the program was not started as a rank and has `--ranks N` (or auto) among its arguments, up to a "--", it
  /// starts itself again as N ranks with its other arguments, as `lockstep run` would. The constructor does not return
  /// then; the process ends with the launcher's exit code. So `./train --ranks 4` needs no launcher. With it,
  /// `--hang-timeout S|off` and `--grace S` are also the launcher's. Construct the Context first: code before it also
  /// runs in the first process, where the arguments still have --ranks. In a rank --ranks is an Error. A program that
  /// parses its arguments before it has a Context uses run_program() (program.h).
  Context(int argc, const char* const* argv, ContextOptions options = {});
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) = delete;

  int rank() const { return group().rank(); }
  int world_size() const { return group().world_size(); }
  int local_rank() const;
  int local_world_size() const;
  bool is_main() const { return rank() == 0; }
  /// The seed from the options, or 0; the same on every rank.
  uint64_t seed() const;
  /// The number of threads that this rank uses for torch's operators.
  int threads() const;
  /// The folder of this run's files, from the launcher; empty without a launcher.
  const std::string& run_dir() const;
  /// Whether this run should save its state and stop, because the launcher or any rank received SIGTERM or SIGUSR1. All
  /// ranks get the same answer at the same call, so all stop after the same step:
  ///
  ///     if (context.stop_requested()) {
  ///       checkpointer.save(step);
  ///       checkpointer.finish();
  ///       return lockstep::kPreempted;
  ///     }
  ///
  /// Every rank must call it equally often, for example once a step. From the first call on, those signals no longer
  /// end the process at once, unless the program has its own handlers. Never waits if `lockstep run` started all ranks;
  /// otherwise it is a small all_reduce. One thread at a time.
  [[nodiscard]] bool stop_requested();
  /// The group of all ranks.
  const Group& group() const;

  /// The number of virtual ranks; 0: there are none.
  int virtual_ranks() const;
  /// The virtual ranks that this rank works for: from `first` up to, but not including, `last`.
  struct Block {
    int first, last;
  };
  Block virtual_block() const;
  /// From now on draws from torch's generator and the next backward belong to this virtual rank of the block. Loaders
  /// call it; a loop without one calls it before each micro-batch. Throws Error for another rank's.
  void enter_virtual_rank(int virtual_rank);
  /// The state of virtual ranks, for loaders; null: there are none.
  const std::shared_ptr<VirtualRanks>& virtual_rank_state() const;

 private:
  friend Context adopt_ranks(AdoptedRanks ranks, ContextOptions options);
  struct State;
  explicit Context(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace lockstep
