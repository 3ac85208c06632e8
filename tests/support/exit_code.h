#pragma once

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>

#include "base/clock.h"

namespace lockstep {

/// The exit code, or 128 + signal; -1 if it does not end within `limit` (then it is killed).
inline int exit_code(pid_t child, std::chrono::milliseconds limit) {
  const Deadline deadline(limit);
  int status = 0;
  while (::waitpid(child, &status, WNOHANG) == 0) {
    if (deadline.passed()) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return -1;
    }
    ::usleep(200);
  }
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace lockstep
