#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// A file that records are appended to while a program works, and that is never a reason for it to stop.
///
/// Records wait in memory until `flush_interval` has passed since the last write, or kMostBytes are waiting; so a
/// killed process loses what is younger than that, and a disk sees a bounded number of writes. Records are written
/// whole: if the disk takes only a part (it is full), that part is taken back, the records that waited are dropped and
/// counted, stderr is told once, and the next record is tried again. Used by one thread.
class GrowingFile {
 public:
  static constexpr size_t kMostBytes = 256 << 10;

  /// `what` names it in the warning, e.g. "the run log". Throws Error if the file cannot be opened, except for want of
  /// space.
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
  bool torn_ = false;  ///< a part of a record could not be taken back
  bool warned_ = false;
  Clock::time_point flushed_;
};

}  // namespace lockstep
