#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "launch/line_splitter.h"
#include "launch/sink.h"

namespace lockstep {

/// What one rank prints: read from its two pipes, kept line by line in its log, and passed on byte by byte where the
/// rank has a sink. The log is made at its first line. Lines that it would not take (a full disk) are counted.
class RankOutput {
 public:
  /// One of the two streams. Its pipe is empty once it has ended.
  struct Stream {
    FileDescriptor pipe;
    Sink* sink = nullptr;
    LineSplitter lines;

    /// Whether there is something to poll and room for it.
    bool wanted() const { return pipe && !(sink != nullptr && sink->full()); }
  };

  explicit RankOutput(std::string log_path) : log_path_(std::move(log_path)) {}

  /// Makes a stream's pipe and returns the rank's end of it. Throws LaunchError.
  FileDescriptor open(Stream& stream, Sink* sink);

  std::array<Stream, 2>& streams() { return streams_; }
  /// Reads one piece of what is there.
  void read(Stream& stream);
  /// Takes all that the pipes hold, ends the last lines and closes. For when the rank is gone.
  void finish();

  const Tail& tail() const { return tail_; }
  /// Empty as long as nothing was printed.
  std::string log_path() const { return log_ ? log_path_ : ""; }
  size_t dropped_lines() const { return dropped_lines_; }
  /// Why lines were dropped.
  const std::string& drop_reason() const { return drop_reason_; }

 private:
  void keep(std::string_view lines);
  void drop(std::string_view lines);

  std::string log_path_;
  FileDescriptor log_;
  std::array<Stream, 2> streams_;
  Tail tail_;
  size_t dropped_lines_ = 0;
  std::string drop_reason_;
};

}  // namespace lockstep
