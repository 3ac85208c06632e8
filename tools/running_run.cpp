#include "running_run.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>

#include "launch/launch_error.h"

namespace lockstep {

RunningRun find_run(const std::string& folder) {
  RunningRun run;
  try {
    run.record = RunRecord::read(folder);
  } catch (const Error& error) {
    throw LaunchError(kExitRefusedInput, error.what());
  }
  const pid_t launcher = run.record.launcher.pid;
  if (!is_there(run.record.launcher))
    throw LaunchError(kExitRefusedInput, "the run in " + folder + " is over: its launcher, process " +
                                             std::to_string(launcher) + ", died without cleaning up");
  if (run.record.board_fd < 0) {
    run.board_failure = "its ranks have no pages";
    return run;
  }
  const std::string path = "/proc/" + std::to_string(launcher) + "/fd/" + std::to_string(run.record.board_fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0)
    run.board_failure =
        path + ": " + std::strerror(errno) + (errno == EACCES ? "; ask as the user who started it" : "");
  else if (run.board = RankBoard::open(fd, run.ranks()); !run.board)
    run.board_failure = path + " was written by another version of Lockstep";
  return run;
}

}  // namespace lockstep
