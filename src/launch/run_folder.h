#pragma once

#include <string>

namespace lockstep {

/// The folder for a run's files. It is made, or found to be writable, before any rank starts; a folder that nobody
/// asked for (no --run-dir) is removed in the end if it is empty.
class RunFolder {
 public:
  /// Empty path: no folder. Throws LaunchError (storage).
  RunFolder(const std::string& path, bool keep_if_empty);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  /// Absolute, or empty.
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool keep_if_empty_;
  bool made_parent_ = false;
};

}  // namespace lockstep
