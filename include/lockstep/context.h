#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <lockstep/group.h>

namespace lockstep {

struct ContextOptions {
  /// Seeds torch's generator with `seed + rank` on every rank. Unset: torch's own default.
  std::optional<uint64_t> seed;
  /// How long to wait for all ranks to appear. The environment may override it (docs/environment.md).
  std::chrono::milliseconds join_timeout = std::chrono::seconds(120);
  /// How long one collective may take before it fails: also how long a rank may work alone, say evaluate, while the
  /// others wait for it. As by PyTorch half an hour; `lockstep run` finds ranks that hang sooner (docs/launcher.md).
  std::chrono::milliseconds collective_timeout = std::chrono::minutes(30);
  /// Engine of the collectives; docs/backends.md names them. Empty: "shm", shared memory, when all ranks are on one
  /// machine, else one that works over the network. One that cannot serve these ranks is an Error on all of them.
  std::string backend;
  /// Let rank 0 say once, on stderr, how the world was formed.
  bool announce = true;
  /// Whether Context(argc, argv) obeys `--ranks N`.
  bool ranks_argument = true;
};

/// The exit code by which a program says that it was asked to leave and has saved its state (Context::stop_requested).
inline constexpr int kPreempted = 60;

/// This process's place among the ranks of the run. Constructing it joins them; destroying it leaves.
///
/// Where the ranks come from is read from the environment, the first that is present: `lockstep run`, torchrun (or its
/// variables set by hand), Open MPI, MPICH, Slurm; else a world of one. docs/environment.md names the variables.
/// A world that is announced but cannot form is an Error on every rank that notices, never a smaller world.
///
/// Every rank must construct one, and may make another when it is gone; two at once are an Error. Blocks until all
/// ranks are there or `join_timeout` has passed. The destructor waits, bounded, for the others, but not in unwinding.
class Context {
 public:
  /// A program that nobody has started as a rank obeys `--ranks N` (or auto) among its arguments, up to a "--": it
  /// starts itself again as N ranks, with its arguments but this one, as `lockstep run` would; the constructor does not
  /// return then, the process ends with the launcher's exit code. So `./train --ranks 4` needs no launcher. Beside it
  /// `--hang-timeout S|off` and `--grace S` are the launcher's, too. Construct the Context first: code before it runs
  /// in the first process as well, where arguments still have --ranks. In a rank --ranks is an Error.
  Context(int argc, char** argv, ContextOptions options = {});
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) = delete;

  int rank() const { return group().rank(); }
  int world_size() const { return group().world_size(); }
  int local_rank() const;
  int local_world_size() const;
  bool is_main() const { return rank() == 0; }
  /// The seed of the options, or 0: the same on every rank.
  uint64_t seed() const;
  /// Threads this rank uses for torch's operators.
  int threads() const;
  /// Folder of this run's files, from the launcher; empty without one.
  const std::string& run_dir() const;
  /// Whether this run is to save its state and leave, because SIGTERM or SIGUSR1 came to the launcher or to any rank.
  /// All ranks get the same answer at the same call, so all stop after the same step:
  ///
  ///     if (context.stop_requested()) {
  ///       checkpointer.save(step);
  ///       checkpointer.finish();
  ///       return lockstep::kPreempted;
  ///     }
  ///
  /// Every rank must call it equally often, say once a step; from the first call on, those signals no longer end the
  /// process at once, unless the program has handlers of its own. Never waits where `lockstep run` started all ranks;
  /// elsewhere it is a small all_reduce. One thread at a time.
  [[nodiscard]] bool stop_requested();
  /// All ranks.
  const Group& group() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
