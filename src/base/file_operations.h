#pragma once

#include <sys/types.h>

namespace lockstep {

/// The system calls that save a file, so that a test can record them, make one fail, or stop after any of them. Each
/// behaves like the call of that name, including errno. Reading bypasses this class.
class FileOperations {
 public:
  virtual ~FileOperations() = default;
  virtual int open(const char* path, int flags, mode_t mode);
  virtual ssize_t write(int file, const void* data, size_t size);
  virtual int truncate(int file, off_t size);
  virtual int sync(int file);
  virtual int rename(const char* from, const char* to);
  virtual int unlink(const char* path);
};

/// The operations in use: the system's, unless a test has replaced them.
FileOperations& file_operations();

/// For tests: while it lives, replaces the operations of the whole process.
class ScopedFileOperations {
 public:
  explicit ScopedFileOperations(FileOperations& operations);
  ~ScopedFileOperations();
  ScopedFileOperations(const ScopedFileOperations&) = delete;
  ScopedFileOperations& operator=(const ScopedFileOperations&) = delete;
};

}  // namespace lockstep
