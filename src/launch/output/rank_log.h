#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"

namespace lockstep {

/// The file of one rank's lines, each after its time of arrival in UTC: "2026-01-31T23:59:59.123Z line". So
/// `sort -m` merges the logs of several ranks, and of several machines. It is made at the first line; earlier
/// content stays. Lines that it cannot take (a full disk) are counted, and noted in it once it takes lines again.
class RankLog {
 public:
  explicit RankLog(std::string path) : path_(std::move(path)) {}

  /// Whole lines.
  void add(std::string_view lines);

  /// Empty while there is no file.
  std::string path() const { return file_ ? path_ : ""; }
  size_t dropped_lines() const { return dropped_lines_; }
  /// Why lines were dropped.
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
