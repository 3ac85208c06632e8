#include "base/state_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

namespace lockstep {
namespace {

constexpr int kStateSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

FileDescriptor StateMemory::make() {
  rlimit limit{};
  // Beyond this limit ftruncate would raise SIGXFSZ.
  if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur < kBytes) return {};
  FileDescriptor memory(::memfd_create("lockstep-state", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory || ::ftruncate(memory.get(), static_cast<off_t>(kBytes)) != 0 ||
      ::fcntl(memory.get(), F_ADD_SEALS, kStateSeals) != 0)
    return {};
  return memory;
}

bool StateMemory::is(int fd) {
  struct stat status {};
  if (fd < 0 || ::fstat(fd, &status) != 0 || static_cast<uint64_t>(status.st_size) != kBytes) return false;
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & kStateSeals) == kStateSeals;
}

}  // namespace lockstep
