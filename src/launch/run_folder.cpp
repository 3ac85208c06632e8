#include "launch/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "launch/launch_error.h"
#include "launch/run_record.h"

namespace lockstep {

namespace fs = std::filesystem;

std::string run_dir_of(const LaunchOptions& options) {
  if (options.in_process) return "";
  if (!options.run_dir.empty()) return options.run_dir;
  return default_run_dir(options.command[0], std::chrono::system_clock::now(), ::getpid());
}

RunFolder::RunFolder(const std::string& path, bool keep_if_empty, Use use) : keep_if_empty_(keep_if_empty) {
  if (path.empty()) return;
  std::error_code error;
  path_ = fs::absolute(path, error).lexically_normal().string();
  const fs::path parent = fs::path(path_).parent_path();
  std::error_code ignored;
  made_parent_ = !fs::exists(parent, ignored);
  if (!error) fs::create_directories(path_, error);
  const auto refuse = [&](const char* what, const std::string& why) {
    throw LaunchError(kExitStorage, std::string("cannot ") + what + " the run folder " + path_ + ": " + why +
                                        "; choose another with --run-dir FOLDER");
  };
  if (error) refuse("make", error.message());
  if (::access(path_.c_str(), W_OK | X_OK) != 0) refuse("write to", std::strerror(errno));
  if (use == Use::kAlone) lock();
}

/// The lock ends with the process. NFS requires a file opened for writing.
void RunFolder::lock() {
  const std::string file = path_ + "/" + kLockFile;
  int trouble = 0;
  do {
    lock_ = FileDescriptor(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    trouble = lock_ && ::flock(lock_.get(), LOCK_EX | LOCK_NB) == 0 ? 0 : errno;
    // Its owner may have removed it in between, at the end of its run.
  } while (trouble == 0 && !has_name(lock_.get(), file));
  if (trouble == 0) return;
  if (trouble != EWOULDBLOCK) {
    lock_trouble_ = "the run folder " + path_ + " cannot be locked (" + std::strerror(trouble) +
                    "), so a second launcher in it would not be refused; give each run a folder of its own";
    return;
  }
  lock_.reset();
  keep_if_empty_ = true;  // it belongs to the other launcher
  std::string who = "another launcher";
  try {
    who += ", process " + std::to_string(RunRecord::read(path_).launcher.pid) + ",";
  } catch (const Error&) {
    // The launcher has not started its ranks yet.
  }
  throw LaunchError(kExitStorage, who + " uses the run folder " + path_ +
                                      "; give each run a folder of its own with --run-dir FOLDER, or none");
}

RunFolder::~RunFolder() {
  if (lock_) ::unlink((path_ + "/" + kLockFile).c_str());
  if (keep_if_empty_ || path_.empty()) return;
  // rmdir refuses a folder that is not empty.
  if (::rmdir(path_.c_str()) == 0 && made_parent_) ::rmdir(fs::path(path_).parent_path().c_str());
}

}  // namespace lockstep
