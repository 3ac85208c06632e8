#include "running_run.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <set>

#include "launch/launch_error.h"
#include "launch/run_folder.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

/// The folders whose locks a process keeps open; none if this user may not look.
std::set<std::string> locked_folders(const fs::path& process) {
  std::set<std::string> folders;
  std::error_code error;
  for (fs::directory_iterator entry(process / "fd", error), end; !error && entry != end; entry.increment(error)) {
    std::error_code unreadable;
    const fs::path target = fs::read_symlink(entry->path(), unreadable);
    if (!unreadable && target.filename() == kLockFile) folders.insert(target.parent_path().string());
  }
  return folders;
}

/// Whether the run in `folder` belongs to this launcher.
bool is_run_of(const std::string& folder, pid_t launcher) {
  try {
    const RunRecord::Contents record = RunRecord::read(folder);
    return record.launcher.pid == launcher && is_there(record.launcher);
  } catch (const Error&) {
    return false;  // no run, or none in progress
  }
}

}  // namespace

RunningRun find_run(const std::string& folder) {
  RunningRun run;
  try {
    run.record = RunRecord::read(folder);
  } catch (const Error& error) {
    throw LaunchError(kExitRefusedInput, error.what());
  }
  const pid_t launcher = run.record.launcher.pid;
  if (!is_there(run.record.launcher))
    throw LaunchError(kExitRefusedInput, "the run in " + folder + " has ended: its launcher, process " +
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

std::vector<std::string> folders_of_running_runs() {
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator entry("/proc", error), end; !error && entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename();
    if (!std::all_of(name.begin(), name.end(), [](unsigned char letter) { return std::isdigit(letter) != 0; }))
      continue;
    struct stat status {};
    if (::stat(entry->path().c_str(), &status) != 0 || status.st_uid != ::geteuid()) continue;
    for (const std::string& folder : locked_folders(entry->path()))
      if (is_run_of(folder, static_cast<pid_t>(std::stol(name)))) found.push_back(folder);
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace lockstep
