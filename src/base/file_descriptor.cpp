#include "base/file_descriptor.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/error.h"

namespace lockstep {

void FileDescriptor::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

bool has_name(int file, const std::string& name) {
  struct stat open, named;
  return ::fstat(file, &open) == 0 && ::stat(name.c_str(), &named) == 0 && open.st_dev == named.st_dev &&
         open.st_ino == named.st_ino;
}

namespace {

constexpr rlim_t kMostCounted = 1 << 20;

rlim_t allowed() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

/// Does not open /proc/self/fd, because there may be no descriptor for it.
size_t count_open() {
  size_t open = 0;
  const auto end = static_cast<int>(std::min(allowed(), kMostCounted));
  for (int fd = 0; fd < end; ++fd) open += ::fcntl(fd, F_GETFD) >= 0;
  return open;
}

std::string plural(size_t count, const char* word) {
  return std::to_string(count) + " " + word + (count == 1 ? "" : "s");
}

[[noreturn]] void throw_too_few(const std::string& what, size_t count) {
  if (errno == ENFILE)
    throw LimitError(
        what + " takes " + plural(count, "more descriptor") +
        ", and the machine has none left for any process (fs.file-max); close programs that hold many descriptors");
  const size_t open = count_open();
  throw LimitError(what + " takes " + plural(count, "more descriptor") + ", but this process may have " +
                   std::to_string(allowed()) + " (ulimit -n) and has " + std::to_string(open) +
                   " open. Allow at least " + std::to_string(open + count) + ", or close what is not needed.");
}

}  // namespace

void require_descriptors(size_t count, const std::string& what) {
  std::vector<FileDescriptor> tried;
  while (tried.size() < count) {
    tried.emplace_back(::open("/", O_PATH | O_CLOEXEC));
    if (tried.back()) continue;
    const int code = errno;
    tried.clear();
    errno = code;
    if (code == EMFILE || code == ENFILE) throw_too_few(what, count);
    throw_errno(what);
  }
}

void throw_errno_or_limit(const std::string& what) {
  if (errno == EMFILE || errno == ENFILE) throw_too_few(what, 1);
  throw_errno(what);
}

}  // namespace lockstep
