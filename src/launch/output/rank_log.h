#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"

namespace lockstep {

/// The log file of one rank: its lines, each preceded by its time of arrival in UTC: "2026-01-31T23:59:59.123Z line".
/// So `sort -m` merges the logs of several ranks, and of several machines. The file is created at the first line;
/// existing content stays. Lines that cannot be written (a full disk) are counted, and the gap is recorded once lines
/// can be written again.
class RankLog {
 public:
  explicit RankLog(std::string path) : path_(std::move(path)) {}

  /// Adds whole lines.
  void add(std::string_view lines);

  /// Empty while there is no file.
  std::string path() const { return file_ ? path_ : ""; }
  size_t dropped_lines() const { return dropped_lines_; }
  /// The reason why lines were dropped.
  const std::string& drop_reason() const { return drop_reason_; }

 private:
  /// Returns the part of `text` that was not written.
  std::string_view write(std::string_view text);
  bool note_gap(const std::string& stamp);

  std::string path_;
  FileDescriptor file_;
  bool torn_ = false;  // the file ends in the middle of a line
  size_t gap_lines_ = 0;
  size_t dropped_lines_ = 0;
  std::string drop_reason_;
};

}  // namespace lockstep
