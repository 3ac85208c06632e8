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
/// A slow reader holds the rank back, as it would without a launcher (see full()); a terminal that has stopped
/// does not, nor does a reader that has taken nothing for kPatience: what they do not take is dropped and counted.
/// A reader that is gone, or a file on a full disk, changes nothing for the rank.
class Sink {
 public:
  static constexpr std::chrono::seconds kPatience{5};

  /// `fd` stays the caller's.
  explicit Sink(int fd);

  void write(std::string_view bytes);
  /// Writes as much as possible of what is queued: call it when poll finds fd() writable.
  void flush();

  int fd() const { return fd_; }
  bool is_terminal() const { return is_terminal_; }
  /// Something is queued.
  bool pending() const { return !queue_.empty(); }
  /// So much is queued that no more should be read from the rank.
  bool full() const;
  /// When check_patience() has something to do.
  std::optional<Clock::time_point> due() const;
  /// Gives up on a reader that has taken nothing for kPatience, until it takes something again.
  void check_patience(Clock::time_point now);
  /// It is a terminal that has been closed.
  bool terminal_is_gone() const;
  /// Ends an unfinished line.
  void start_line();
  /// Bytes that were dropped.
  size_t dropped_bytes() const { return dropped_bytes_; }

 private:
  int fd_;
  FileDescriptor reopened_;  // the same pipe or terminal, in non-blocking mode for us alone
  bool is_terminal_;
  bool closed_ = false;  // its reader is gone
  bool hung_ = false;    // its reader has taken nothing for kPatience
  bool at_line_start_ = true;
  std::optional<Clock::time_point> stuck_since_;  // since then the reader has taken nothing of the queue
  std::string queue_;
  size_t dropped_bytes_ = 0;
};

}  // namespace lockstep
