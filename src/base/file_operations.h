#pragma once

#include <sys/types.h>

namespace lockstep {

/// The system calls that saving a file makes, so that a test can record them, make one fail, or stop after any of them.
/// Each does what the call of that name does, including errno. Reading does not go through it.
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

/// For tests: replaces the operations of the whole process while it lives.
class ScopedFileOperations {
 public:
  explicit ScopedFileOperations(FileOperations& operations);
  ~ScopedFileOperations();
  ScopedFileOperations(const ScopedFileOperations&) = delete;
  ScopedFileOperations& operator=(const ScopedFileOperations&) = delete;
};

}  // namespace lockstep
