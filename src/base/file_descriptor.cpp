#include "base/file_descriptor.h"

#include <sys/stat.h>
#include <unistd.h>

namespace lockstep {

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool has_name(int file, const std::string& name) {
  struct stat open, named;
  return ::fstat(file, &open) == 0 && ::stat(name.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

}  // namespace lockstep
