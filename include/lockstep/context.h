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
  /// Seeds torch's generator with `seed + rank` (with virtual ranks: docs/exactness.md). Must be the same on all ranks,
  /// or Error. Unset: torch's own default.
  std::optional<uint64_t> seed{};
  /// Seeds every rank with `seed` at first, so that all draw the same problem and weights, and with `seed + rank` when
  /// the loop begins: at the first training pass of a loader (one without `exactly_once`) or the first backward of a
  /// DistributedDataParallel. A resumed generator state replaces the second seed. Needs a seed. Must be the same on all
  /// ranks, or Error. With virtual ranks this is always so.
  bool same_seed_until_loop = false;
  /// The number of virtual ranks. The run then gives the same bits on any number of ranks up to this one
  /// (docs/exactness.md). Each rank works for a block of virtual ranks in turn, and a step takes one micro-batch of
  /// each. 0: the environment's number, else none (docs/environment.md). Fewer virtual ranks than ranks are an Error.
  int virtual_ranks = 0;
  /// Threads per torch operator. 0: this rank's share of the cores, or 1 with virtual ranks, because results depend on
  /// it. The environment may override it.
  int threads = 0;
  /// How long to wait for all ranks to join. The environment may override it (docs/environment.md).
  std::chrono::milliseconds join_timeout = std::chrono::seconds(120);
  /// The time after which a collective fails. It bounds how long a rank may work alone, for example evaluate, while the
  /// others wait for it. Half an hour, as in PyTorch; `lockstep run` finds ranks that hang sooner (docs/launcher.md).
  std::chrono::milliseconds collective_timeout = std::chrono::minutes(30);
  /// The engine of the collectives (docs/backends.md). Empty: "shm" (shared memory) if all ranks are on one machine,
  /// "hierarchical" if several machines have several ranks, else an engine that works over the network alone. An engine
  /// that cannot serve these ranks is an Error on all of them.
  std::string backend{};
  /// Whether rank 0 prints one message to stderr that says how the world was formed.
  bool announce = true;
  /// Whether Context(argc, argv) obeys `--ranks N`.
  bool ranks_argument = true;
};

/// The exit code of a program that was asked to stop and has saved its state (Context::stop_requested()).
inline constexpr int kPreempted = 60;

/// This process's place among the ranks of the run. Constructing it joins them; destroying it leaves.
///
/// The environment tells where the ranks come from. The first of these that is present counts: `lockstep run`, torchrun
/// (or its variables, set by hand), Open MPI, MPICH, Slurm. Without any, it is a world of one. docs/environment.md
/// names the variables; mpi.h makes a Context from an MPI communicator. A world that is announced but cannot be formed
/// is an Error on every rank that notices, never a smaller world.
///
/// Every rank must construct one, and may construct another after destroying it; two at once are an Error. Blocks until
/// all ranks have joined or `join_timeout` has passed. The destructor waits for a few seconds for operations whose Work
/// nobody waited for, and warns of those that fail or are not done, then as long for the other ranks; during stack
/// unwinding it does neither.
class Context {
 public:
  /// If the program was not started as a rank and has `--ranks N` (or auto) among its arguments, up to a "--", the
  /// constructor starts the program again as N ranks with the other arguments, as `lockstep run` would, and does not
  /// return: the process ends with the launcher's exit code. So `./train --ranks 4` needs no launcher. With `--ranks`,
  /// the launcher's `--hang-timeout S|off` and `--grace S` are recognized, too. In a rank --ranks is an Error.
  /// Construct the Context first: code before it also runs in the first process, whose arguments still have --ranks. A
  /// program that parses its arguments before it has a Context uses run_program() (program.h).
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
  /// The number of threads that torch's operators use on this rank.
  int threads() const;
  /// The folder of this run's files, from the launcher. Empty without a launcher.
  const std::string& run_dir() const;
  /// Whether this run should save its state and stop, because the launcher or any rank received SIGTERM or SIGUSR1. All
  /// ranks get the same answer from the same call, so all stop after the same step:
  ///
  ///     if (context.stop_requested()) {
  ///       checkpointer.save(step);
  ///       checkpointer.finish();
  ///       return lockstep::kPreempted;
  ///     }
  ///
  /// Every rank must call it equally often, for example once a step. From the first call on, those signals no longer
  /// end the process at once, unless the program has its own handlers. Never waits if `lockstep run` started all ranks;
  /// otherwise it is a small all_reduce. One thread at a time may call it.
  [[nodiscard]] bool stop_requested();
  /// The group of all ranks.
  const Group& group() const;

  /// The number of virtual ranks, or 0.
  int virtual_ranks() const;
  /// This rank's virtual ranks: from `first` up to, but not including, `last`.
  struct Block {
    int first, last;
  };
  Block virtual_block() const;
  /// From now on, draws from torch's generator and the next backward belong to this virtual rank of the block. Loaders
  /// call it; a loop without one calls it before each micro-batch. Throws Error for a virtual rank of another rank.
  void enter_virtual_rank(int virtual_rank);
  /// The state of virtual ranks, for loaders. Null: none.
  const std::shared_ptr<VirtualRanks>& virtual_rank_state() const;

 private:
  friend Context adopt_ranks(AdoptedRanks ranks, ContextOptions options);
  struct State;
  explicit Context(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

}  // namespace lockstep
