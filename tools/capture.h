#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

namespace lockstep {

/// A program's end and its output.
struct Captured {
  int exit_code = -1;  ///< 128 + n for a signal; -1: not started, or took too long (see failure)
  std::string out, err;
  std::string failure;  ///< the reason why there is no exit code
};

/// Runs `command` (found by PATH) with an empty stdin, without a shell. When `timeout` passes, it is killed with its
/// process group; when this process ends, the program itself is killed. Keeps the first MiB of each stream.
/// `objection`, called every 20 ms, returns the reason to kill it now; empty: none.
Captured capture(const std::vector<std::string>& command, std::chrono::milliseconds timeout,
                 const std::function<std::string()>& objection = {});

}  // namespace lockstep
