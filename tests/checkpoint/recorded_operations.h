#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "base/file_operations.h"

namespace lockstep::testing {

/// A system call of a save that changes what is on the disk.
struct Call {
  enum class Kind { kCreate, kWrite, kTruncate, kSync, kSyncFolder, kRename, kUnlink } kind;
  int file = -1;         ///< number of the file, counted from 0 as they were created
  std::string name, to;  ///< of the directory entry
  std::string data;      ///< written
};

/// Makes the calls and records them.
class RecordedOperations : public FileOperations {
 public:
  int open(const char* path, int flags, mode_t mode) override {
    const int file = FileOperations::open(path, flags, mode);
    if (file < 0) return file;
    const std::lock_guard lock(mutex_);
    if ((flags & O_DIRECTORY) != 0) {
      folders_[file] = true;
    } else if ((flags & O_CREAT) != 0) {
      folders_[file] = false;
      numbers_[file] = next_;
      calls_.push_back({.kind = Call::Kind::kCreate, .file = next_++, .name = name_of(path)});
    }
    return file;
  }
  ssize_t write(int file, const void* data, size_t size) override {
    // In small pieces, so that there are many states between.
    const size_t part = std::min<size_t>(size, kPiece);
    const ssize_t done = FileOperations::write(file, data, part);
    const std::lock_guard lock(mutex_);
    if (done > 0)
      calls_.push_back({.kind = Call::Kind::kWrite,
                        .file = numbers_[file],
                        .data = std::string(static_cast<const char*>(data), static_cast<size_t>(done))});
    return done;
  }
  int truncate(int file, off_t size) override {
    const std::lock_guard lock(mutex_);
    calls_.push_back({.kind = Call::Kind::kTruncate, .file = numbers_[file]});
    return FileOperations::truncate(file, size);
  }
  int sync(int file) override {
    const std::lock_guard lock(mutex_);
    const bool folder = folders_[file];
    calls_.push_back(
        {.kind = folder ? Call::Kind::kSyncFolder : Call::Kind::kSync, .file = folder ? -1 : numbers_[file]});
    return 0;  // the disk is the test's own
  }
  int rename(const char* from, const char* to) override {
    const std::lock_guard lock(mutex_);
    calls_.push_back({.kind = Call::Kind::kRename, .name = name_of(from), .to = name_of(to)});
    return FileOperations::rename(from, to);
  }
  int unlink(const char* path) override {
    const std::lock_guard lock(mutex_);
    calls_.push_back({.kind = Call::Kind::kUnlink, .name = name_of(path)});
    return FileOperations::unlink(path);
  }

  const std::vector<Call>& calls() const { return calls_; }

 private:
  static constexpr size_t kPiece = 256;
  static std::string name_of(const std::string& path) { return path.substr(path.rfind('/') + 1); }

  std::mutex mutex_;
  std::vector<Call> calls_;
  std::map<int, bool> folders_;
  std::map<int, int> numbers_;
  int next_ = 0;
};

/// Makes the n-th call fail with an errno, and with `for_good` every later one of its kind.
class FailingOperations : public FileOperations {
 public:
  FailingOperations(int which, int error, bool for_good) : which_(which), error_(error), for_good_(for_good) {}

  int open(const char* path, int flags, mode_t mode) override {
    return fails("open") ? -1 : FileOperations::open(path, flags, mode);
  }
  ssize_t write(int file, const void* data, size_t size) override {
    if (!fails("write")) return FileOperations::write(file, data, size);
    // Half of it may have been written; but a call that was interrupted has written nothing.
    const ssize_t ignored = error_ != EINTR ? FileOperations::write(file, data, size / 2) : 0;
    static_cast<void>(ignored);
    errno = error_;
    return -1;
  }
  int truncate(int file, off_t size) override { return fails("truncate") ? -1 : FileOperations::truncate(file, size); }
  int sync(int file) override { return fails("sync") ? -1 : FileOperations::sync(file); }
  int rename(const char* from, const char* to) override {
    return fails("rename") ? -1 : FileOperations::rename(from, to);
  }
  int unlink(const char* path) override { return fails("unlink") ? -1 : FileOperations::unlink(path); }

  const std::string& failed() const { return failed_; }

 private:
  bool fails(const std::string& call) {
    const bool now = count_++ == which_;
    if (now) failed_ = call;
    if (!now && !(for_good_ && call == failed_)) return false;
    errno = error_;
    return true;
  }

  const int which_, error_;
  const bool for_good_;
  int count_ = 0;
  std::string failed_;
};

}  // namespace lockstep::testing
