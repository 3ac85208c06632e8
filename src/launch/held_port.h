#pragma once

#include "base/file_descriptor.h"

namespace lockstep {

/// A free TCP port of 127.0.0.1, kept for somebody who will listen on it with SO_REUSEADDR (as c10d's TCPStore does).
/// Nothing listens here, and the kernel gives the port to nobody who asks for any free one.
class HeldPort {
 public:
  HeldPort();
  /// 0 where there is none to have.
  int number() const { return number_; }

 private:
  FileDescriptor socket_;
  int number_ = 0;
};

}  // namespace lockstep
