#pragma once

#include <string>

#include "base/error.h"

namespace lockstep {

/// Exit codes of `lockstep`. Stable, because scripts and schedulers rely on them. A run interrupted by SIGINT or SIGHUP
/// to the launcher ends with 128 + the signal's number, as in shells.
enum ExitCode : int {
  kExitOk = 0,
  kExitBadCommandLine = 2,
  kExitRankFailed = 40,  ///< a rank ended by itself with a code other than 0
  kExitRankKilled = 41,
  kExitOutOfMemory = 42,  ///< a rank was killed for memory
  kExitHang = 43,         ///< the ranks made no progress, or one did not arrive
  kExitMismatch = 44,     ///< the ranks' collectives do not match
  kExitDiverged = 45,     ///< the replicas differ, or a value is not finite
  kExitNotStarted = 46,   ///< the program could not be started
  kExitRefusedPeer = 47,
  kExitStorage = 48,        ///< the run folder cannot be used
  kExitRefusedInput = 49,   ///< a file cannot be read, or is damaged or of another kind
  kExitResourceLimit = 50,  ///< no more processes, descriptors or memory
  kExitTooFewRanks = 51,    ///< --elastic: fewer ranks than its minimum would remain
  kExitMachineLost = 52,    ///< a machine of the run is out of reach
  kExitPreempted = 60,  ///< asked to leave (SIGTERM, SIGUSR1), and the state is saved; also a rank's own code for it
  kExitPreemptedUnsaved = 61,
  kExitOurBug = 70,
};

/// The launcher cannot continue; it ends with this code.
class LaunchError : public Error {
 public:
  LaunchError(ExitCode code, const std::string& text) : Error(text), exit_code(code) {}
  const ExitCode exit_code;
  /// The cause is external, a lost machine or a SIGKILL, and says nothing about the program: another try is worthwhile.
  bool from_outside = false;
  int lost_ranks = 0;  ///< of lost machines
};

/// Throws LaunchError (resource limit) with the failed action and the reason, by errno; for descriptors, with the
/// numbers that this process may have, has, and needs.
[[noreturn]] void throw_limit(const std::string& what);

/// Throws the same error unless this process can open `descriptors` more descriptors, which `what` needs.
void require_for_launch(size_t descriptors, const std::string& what);

}  // namespace lockstep
