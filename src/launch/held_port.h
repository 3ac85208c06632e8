#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// A free TCP port of a numeric address of this machine, reserved for a process that will listen on it with
/// SO_REUSEADDR (as c10d's TCPStore does). Nothing listens here, and the kernel does not give out the port as a free
/// one.
class HeldPort {
 public:
  explicit HeldPort(const std::string& address = "127.0.0.1");
  /// 0 if none was free.
  int number() const { return number_; }

 private:
  FileDescriptor socket_;
  int number_ = 0;
};

}  // namespace lockstep
