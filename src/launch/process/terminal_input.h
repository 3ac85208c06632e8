#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// Passes what is typed on the launcher's terminal on to rank 0. Rank 0 can not read the terminal itself: it is in a
/// process group of its own, and the kernel stops whoever reads a terminal from outside of its foreground group.
/// An input that is no terminal needs none of this; rank 0 simply inherits it.
class TerminalInput {
 public:
  TerminalInput() = default;  ///< passes nothing on
  /// `rank_end` becomes rank 0's end of the pipe. Throws LaunchError.
  TerminalInput(int terminal, FileDescriptor& rank_end);

  /// Descriptor and events to poll; descriptor -1 when there is nothing to wait for.
  int fd() const;
  short events() const;
  /// Call it when fd() is ready.
  void pass_on();
  /// The launcher may have come to the foreground (SIGCONT): look again.
  void resume() { in_background_ = false; }

 private:
  int terminal_ = -1;
  FileDescriptor pipe_;
  std::string queue_;
  bool in_background_ = false;
};

}  // namespace lockstep
