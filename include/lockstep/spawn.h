#pragma once

#include <chrono>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

#include <lockstep/error.h>

namespace lockstep {

struct SpawnOptions {
  /// The ranks' arguments, after the program's name. With `same_arguments` these are this process's arguments.
  bool same_arguments = true;
  std::vector<std::string> arguments{};
  /// How long ranks may hang before they are ended: some wait for a rank that neither computes nor calls heartbeat()
  /// (docs/launcher.md). milliseconds::max(): forever.
  std::chrono::milliseconds hang_timeout = std::chrono::minutes(5);
  /// When a rank has failed: the time between asking the others to stop and killing them.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
};

/// Thrown by spawn() when its ranks fail. Describes the rank that failed first, as far as this can be determined.
class RankError : public Error {
 public:
  RankError(const std::string& text, int rank, int exit_code) : Error(text), rank_(rank), exit_code_(exit_code) {}
  int rank() const { return rank_; }
  /// The exit code that `lockstep run` would have ended with: 40 for an exception or exit, 41 for a signal, ...
  /// (docs/launcher.md).
  int exit_code() const { return exit_code_; }

 private:
  int rank_;
  int exit_code_;
};

/// Runs `function(rank)` in `ranks` new processes, which Context and all else treat as ranks, and returns when all are
/// done. For programs and tests without a launcher.
///
///     lockstep::spawn(4, [](int) {
///       lockstep::Context context;
///       ...
///     });
///
/// The ranks execute this program again, with the same arguments, reach this call as this process did, and run
/// `function` there. So **all code before the call runs again in every rank**: put nothing there that should happen
/// only once. Calls are identified by their place in the source and counted there; in a rank, all other calls return at
/// once. A rank that ends without reaching this call is an error. `function` captures values that the code before it
/// computed in the rank, and nothing that it writes comes back. (A fork would give the ranks this process's memory, but
/// no working thread pools: once LibTorch has run a parallel operation, a forked child hangs in its next one.)
///
/// The ranks write where this process writes; their stdin is empty. They exit with 0 when `function` returns. If one
/// throws or ends otherwise, the others are stopped, and RankError is thrown here with its rank and text (the first
/// 1,000 characters of what()). All waits are bounded: a rank that does not stop is killed after `grace`, and ranks
/// that hang are ended after `hang_timeout`. If this process is killed, its ranks die with it.
///
/// A signal that would end this process (Ctrl-C) stops the ranks and is then raised again. Call it from one thread at a
/// time. Calling it in a process that is itself a rank is an Error.
void spawn(int ranks, const std::function<void(int rank)>& function, const SpawnOptions& options = {},
           const std::source_location& where = std::source_location::current());

}  // namespace lockstep
