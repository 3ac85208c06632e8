#include "base/file_descriptor.h"

#include <unistd.h>

namespace lockstep {

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

}  // namespace lockstep
