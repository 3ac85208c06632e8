#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// Forwards input typed on the launcher's terminal to rank 0. Rank 0 cannot read the terminal itself: it is in its own
/// process group, and the kernel stops a process that reads a terminal from outside its foreground group. Input that is
/// not a terminal needs none of this; rank 0 simply inherits it.
class TerminalInput {
 public:
  TerminalInput() = default;  ///< forwards nothing
  /// `rank_end` becomes rank 0's end of the pipe. Throws LaunchError.
  TerminalInput(int terminal, FileDescriptor& rank_end);

  /// The descriptor and events to poll; -1 if there is nothing to wait for.
  int fd() const;
  short events() const;
  /// Called when fd() is ready.
  void pass_on();
  /// Called on SIGCONT, since the launcher may have come to the foreground: checks again.
  void resume() { in_background_ = false; }

 private:
  int terminal_ = -1;
  FileDescriptor pipe_;
  std::string queue_;
  bool in_background_ = false;
};

}  // namespace lockstep
