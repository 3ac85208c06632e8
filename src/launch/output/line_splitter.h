#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace lockstep {

/// Splits a stream of bytes into lines. For a line redrawn after carriage returns only the last state counts, without
/// the escape sequence that erases the rest of a longer one. A line over kMaxLineBytes is broken.
class LineSplitter {
 public:
  static constexpr size_t kMaxLineBytes = 64 << 10;

  /// Appends the lines that `bytes` complete to `lines`, each with its newline.
  void feed(std::string_view bytes, std::string& lines);
  /// Appends the unfinished line, if any.
  void finish(std::string& lines);

 private:
  std::string line_;
  bool redrawn_ = false;  // after a carriage return: the following text, except a newline, replaces the line
};

/// The last lines of a text.
class Tail {
 public:
  static constexpr size_t kLines = 20;
  static constexpr size_t kLineBytes = 2000;

  /// REQUIRES: each of `lines` ends in a newline.
  void add(std::string_view lines);
  const std::deque<std::string>& lines() const { return lines_; }

 private:
  std::deque<std::string> lines_;
};

}  // namespace lockstep
