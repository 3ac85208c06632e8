#include "launch/run_folder.h"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "launch/launch_error.h"

namespace lockstep {

namespace fs = std::filesystem;

RunFolder::RunFolder(const std::string& path, bool keep_if_empty) : keep_if_empty_(keep_if_empty) {
  if (path.empty()) return;
  std::error_code error;
  path_ = fs::absolute(path, error).lexically_normal().string();
  const fs::path parent = fs::path(path_).parent_path();
  std::error_code ignored;
  made_parent_ = !fs::exists(parent, ignored);
  if (!error) fs::create_directories(path_, error);
  if (error) throw LaunchError(kExitStorage, "cannot make the run folder " + path_ + ": " + error.message());
  if (::access(path_.c_str(), W_OK | X_OK) != 0)
    throw LaunchError(kExitStorage, "cannot write to the run folder " + path_ + ": " + std::strerror(errno));
}

RunFolder::~RunFolder() {
  if (keep_if_empty_ || path_.empty()) return;
  // rmdir refuses a folder that is not empty.
  if (::rmdir(path_.c_str()) == 0 && made_parent_) ::rmdir(fs::path(path_).parent_path().c_str());
}

}  // namespace lockstep
