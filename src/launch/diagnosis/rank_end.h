#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "launch/diagnosis/memory_kills.h"
#include "launch/process/process.h"
#include "rank_page/rank_page.h"

namespace lockstep {

struct RankEnd {
  int rank = 0;
  pid_t pid = 0;
  ProcessEnd how;
  double seconds = 0;       ///< from its start
  int wake_up = 0;          ///< the launcher's wake-up that saw it: ends of one wake-up have no known order
  bool stopped = false;     ///< it had been asked to stop before
  uint64_t peak_bytes = 0;  ///< peak resident memory of the rank, or of a child it waited for
  MemoryKills memory;       ///< for SIGKILL: by the kernel on its machine, from the start of the ranks until then
  std::string lost;         ///< kLost: the facts known about its machine
  bool ended = true;        ///< false: it is still running, and others accuse it

  bool failed_by_itself() const { return ended && how.failed() && !stopped; }
};

/// Null if the rank has not ended.
const RankEnd* find_end(const std::vector<RankEnd>& ends, int rank);

/// Whether no other rank can have caused this end.
bool was_killed(const RankEnd& end);

/// Whether it ended with an uncaught exception, rather than by a signal that looks like one.
bool ended_by_exception(const RankEnd& end, const RankStatus& account);

/// The text of the next function, or "threw: <the exception's text>".
std::string describe(const RankEnd& end, const RankStatus& account);

/// "exit code 3", "killed by SIGKILL (Killed)", "could not be started: Exec format error".
std::string describe(const ProcessEnd& how);

}  // namespace lockstep
