#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// The launcher's own stdout or stderr, written without ever blocking.
///
/// A slow reader slows the rank down, as it would without a launcher (see full()). A stopped terminal does not, nor
/// does a reader that has read nothing for kPatience: their output is dropped and counted. If the reader is gone, or
/// the file's disk is full, the rank is not affected.
class Sink {
 public:
  static constexpr std::chrono::seconds kPatience{5};

  /// `fd` remains owned by the caller.
  explicit Sink(int fd);

  void write(std::string_view bytes);
  /// Writes as much of the queue as possible. Called when poll finds fd() writable.
  void flush();

  int fd() const { return fd_; }
  bool is_terminal() const { return is_terminal_; }
  bool pending() const { return !queue_.empty(); }
  /// Whether the queue is so long that no more should be read from the rank.
  bool full() const;
  /// The next time at which check_patience() has work.
  std::optional<Clock::time_point> due() const;
  /// Gives up on a reader that has taken nothing for kPatience, until it reads again.
  void check_patience(Clock::time_point now);
  /// Whether it is a terminal that has been closed.
  bool terminal_is_gone() const;
  /// Ends an unfinished line.
  void start_line();
  size_t dropped_bytes() const { return dropped_bytes_; }

 private:
  int fd_;
  FileDescriptor reopened_;  // the same pipe or terminal, non-blocking for this process alone
  bool is_terminal_;
  bool closed_ = false;  // its reader is gone
  bool hung_ = false;    // its reader has read nothing for kPatience
  bool at_line_start_ = true;
  std::optional<Clock::time_point> stuck_since_;  // the reader has read nothing of the queue since then
  std::string queue_;
  size_t dropped_bytes_ = 0;
};

}  // namespace lockstep
