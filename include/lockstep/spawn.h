#pragma once

#include <chrono>
#include <functional>
#include <source_location>
#include <string>
#include <vector>

#include <lockstep/error.h>

namespace lockstep {

struct SpawnOptions {
  /// Arguments of the ranks, after the program's name. `same_arguments`: those of this process.
  bool same_arguments = true;
  std::vector<std::string> arguments;
  /// After how long a standstill the ranks are ended as a hang: others wait for a rank that neither computes nor calls
  /// heartbeat() (docs/launcher.md). milliseconds::max(): never.
  std::chrono::milliseconds hang_timeout = std::chrono::minutes(5);
  /// Between asking the ranks to stop, when one has failed, and killing them.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
};

/// What spawn() throws when its ranks fail: of the rank that failed first, as far as can be known.
class RankError : public Error {
 public:
  RankError(const std::string& text, int rank, int exit_code) : Error(text), rank_(rank), exit_code_(exit_code) {}
  int rank() const { return rank_; }
  /// What `lockstep run` would have ended with: 40 an exception or exit, 41 a signal, ... (docs/launcher.md).
  int exit_code() const { return exit_code_; }

 private:
  int rank_;
  int exit_code_;
};

/// Runs `function(rank)` in `ranks` new processes, which are ranks to Context and everything else, and returns when all
/// are done: ranks for a program, or a test, that no launcher has started.
///
///     lockstep::spawn(4, [](int) {
///       lockstep::Context context;
///       ...
///     });
///
/// The ranks execute this program again, with the same arguments: they come to this call by the same way as this
/// process did, and run `function` there. So **all code before the call runs again in every rank**: have nothing
/// before it that should happen once. Calls are told apart by their place in the source and counted there: in a rank,
/// all others return at once. A rank that ends without having come to this call is an error. What `function` captures
/// is what that code has computed in the rank; nothing it writes comes back. (A fork would give the ranks this
/// process's memory, but no working thread pools: after the first parallel operation of LibTorch a forked child hangs
/// in its next.)
///
/// The ranks write where this process writes; their stdin is empty. When `function` has returned they exit with 0.
/// When one throws, or ends otherwise, the others are stopped, and RankError is thrown here with its rank and text (of
/// an exception the first 1,000 characters of what()). Bounded: a rank that does not stop is killed after `grace`,
/// ranks that hang end after `hang_timeout`. If this process is killed, its ranks die with it.
///
/// A signal that would end this process (Ctrl-C) stops the ranks and is then raised again. Call it from one thread at
/// a time, and not in a process that is a rank itself: that is an Error.
void spawn(int ranks, const std::function<void(int rank)>& function, const SpawnOptions& options = {},
           const std::source_location& where = std::source_location::current());

}  // namespace lockstep
