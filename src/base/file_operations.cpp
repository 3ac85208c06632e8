#include "base/file_operations.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>

namespace lockstep {
namespace {

FileOperations& system_operations() {
  static FileOperations operations;
  return operations;
}

std::atomic<FileOperations*> in_use = nullptr;

}  // namespace

int FileOperations::open(const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }
ssize_t FileOperations::write(int file, const void* data, size_t size) { return ::write(file, data, size); }
int FileOperations::truncate(int file, off_t size) { return ::ftruncate(file, size); }
int FileOperations::sync(int file) { return ::fsync(file); }
int FileOperations::rename(const char* from, const char* to) { return ::rename(from, to); }
int FileOperations::unlink(const char* path) { return ::unlink(path); }

FileOperations& file_operations() {
  FileOperations* operations = in_use.load();
  return operations != nullptr ? *operations : system_operations();
}

ScopedFileOperations::ScopedFileOperations(FileOperations& operations) { in_use = &operations; }
ScopedFileOperations::~ScopedFileOperations() { in_use = nullptr; }

}  // namespace lockstep
