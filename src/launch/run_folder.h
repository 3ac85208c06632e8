#pragma once

#include <string>

#include "base/file_descriptor.h"
#include "launch/plan.h"

namespace lockstep {

/// The folder for a run's files, by its options; empty: there is no folder.
std::string run_dir_of(const LaunchOptions& options);

/// The lock file in a run's folder, held by its launcher while it lives.
inline constexpr const char* kLockFile = ".lock";

/// The folder for a run's files. It is created, or found writable, before any rank starts. A folder that the user did
/// not request (no --run-dir) is removed at the end if it is empty.
class RunFolder {
 public:
  enum class Use {
    kAlone,   ///< a launcher's: another one is refused while this object lives
    kShared,  ///< an agent's, next to the launcher's
  };
  /// Empty path: no folder. Throws LaunchError (storage).
  RunFolder(const std::string& path, bool keep_if_empty, Use use);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// An absolute path, or empty.
  const std::string& path() const { return path_; }
  /// The reason why another launcher would not be refused; empty if it would be.
  const std::string& lock_trouble() const { return lock_trouble_; }

 private:
  void lock();

  std::string path_;
  FileDescriptor lock_;
  std::string lock_trouble_;
  bool keep_if_empty_;
  bool made_parent_ = false;
};

}  // namespace lockstep
