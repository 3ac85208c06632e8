#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// How a program ended, and what it printed.
struct Captured {
  int exit_code = -1;  ///< 128 + n for a signal; -1: it could not be started, or took too long (see failure)
  std::string out, err;
  std::string failure;  ///< why there is no exit code
};

/// Runs `command` (found by PATH) with an empty stdin, without a shell. When `timeout` passes it is killed, with its
/// process group; when this process ends, the program itself is. Of each stream the first MiB is kept. `objection`,
/// asked every 20 ms, says why it must be killed now; empty: it need not.
Captured capture(const std::vector<std::string>& command, std::chrono::milliseconds timeout,
                 const std::function<std::string()>& objection = {});

}  // namespace lockstep
