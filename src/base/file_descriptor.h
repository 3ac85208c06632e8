#pragma once

#include <cstddef>
#include <string>
#include <utility>

namespace lockstep {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~FileDescriptor() { reset(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void reset();
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_ = -1;
};

/// Whether `name` still refers to the open file; another process may have removed or replaced it.
bool has_name(int file, const std::string& name);

/// Throws LimitError unless `count` more descriptors can be opened now; tests this by opening and closing them. `what`
/// is the operation that needs them ("forming a group of 2 ranks"). The text has the numbers allowed, open and needed.
void require_descriptors(size_t count, const std::string& what);

/// throw_errno(what), but throws LimitError if the process or the system has no descriptor left.
[[noreturn]] void throw_errno_or_limit(const std::string& what);

}  // namespace lockstep
