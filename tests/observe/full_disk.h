#pragma once

#include <cerrno>
#include <cstdint>

#include "base/file_operations.h"

namespace lockstep {

/// A disk with so much room; the write that finds less takes what fits.
class FullDisk : public FileOperations {
 public:
  explicit FullDisk(int64_t bytes) : room(bytes) {}

  int open(const char* path, int flags, mode_t mode) override {
    if (!refuses_to_open) return FileOperations::open(path, flags, mode);
    errno = ENOSPC;
    return -1;
  }
  ssize_t write(int file, const void* data, size_t size) override {
    ++writes;
    if (room == 0) {
      errno = ENOSPC;
      return -1;
    }
    const ssize_t written = FileOperations::write(file, data, size < static_cast<size_t>(room) ? size : room);
    if (written > 0) room -= written;
    return written;
  }

  int64_t room;
  int64_t writes = 0;
  bool refuses_to_open = false;
};

}  // namespace lockstep
