#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// The launcher's own stdout or stderr, written without ever waiting for it.
///
/// A reader that is slow holds the rank back, as it would without a launcher (see full()); a terminal that has stopped
/// does not, nor does a reader that has taken nothing for kPatience: what they would not take is dropped and counted.
/// A reader that has gone away, or a file on a full disk, changes nothing for the rank.
class Sink {
 public:
  static constexpr std::chrono::seconds kPatience{5};

  /// `fd` stays the caller's.
  explicit Sink(int fd);

  void write(std::string_view bytes);
  /// Writes what is queued, as far as it goes: call it when poll finds fd() writable.
  void flush();

  int fd() const { return fd_; }
  bool is_terminal() const { return is_terminal_; }
  /// Something is queued.
  bool pending() const { return !queue_.empty(); }
  /// So much is queued that no more should be read for it.
  bool full() const;
  /// When check_patience() has something to do.
  std::optional<Clock::time_point> due() const;
  /// Gives a reader up that has taken nothing for kPatience, until it takes something again.
  void check_patience(Clock::time_point now);
  /// It was a terminal, and that has been closed.
  bool terminal_is_gone() const;
  /// Ends the line that has begun, if any.
  void start_line();
  /// Bytes that went nowhere.
  size_t dropped_bytes() const { return dropped_bytes_; }

 private:
  int fd_;
  FileDescriptor reopened_;  // the same pipe or terminal, in non-blocking mode for us alone
  bool is_terminal_;
  bool closed_ = false;  // its reader is gone
  bool hung_ = false;    // its reader has taken nothing for kPatience
  bool at_line_start_ = true;
  std::optional<Clock::time_point> stuck_since_;  // what is queued waits for the reader
  std::string queue_;
  size_t dropped_bytes_ = 0;
};

}  // namespace lockstep
