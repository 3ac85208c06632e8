#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// A file to which records are appended while a program runs, and which never makes the program fail.
///
/// Records wait in memory until `flush_interval` has passed since the last write, or kMostBytes are waiting. So a
/// killed process loses only newer records, and the number of writes is bounded. Records are written whole: if the disk
/// is full and takes only a part, that part is removed, the waiting records are dropped and counted, a message goes to
/// stderr once, and the next record is tried again. Used by one thread.
class GrowingFile {
 public:
  static constexpr size_t kMostBytes = 256 << 10;

  /// `what` names it in the warning, e.g. "the run log". Throws Error if the file cannot be opened, unless only space
  /// is missing.
  GrowingFile(std::string path, std::string what, std::chrono::milliseconds flush_interval);
  ~GrowingFile();
  GrowingFile(const GrowingFile&) = delete;
  GrowingFile& operator=(const GrowingFile&) = delete;

  void append(std::string_view record);
  void flush();

  const std::string& path() const { return path_; }
  /// Records dropped so far.
  int64_t lost() const { return lost_; }

 private:
  bool open();
  bool write_whole();
  void drop(int error);

  const std::string path_;
  const std::string what_;
  const std::chrono::milliseconds flush_interval_;
  FileDescriptor file_;
  std::string waiting_;
  int64_t records_waiting_ = 0;
  int64_t lost_ = 0;
  int64_t end_ = 0;    ///< of the last whole record
  bool torn_ = false;  ///< a part of a record could not be removed
  bool warned_ = false;
  Clock::time_point flushed_;
};

}  // namespace lockstep
