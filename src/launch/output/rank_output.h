#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "launch/output/line_merger.h"
#include "launch/output/line_splitter.h"
#include "launch/output/rank_log.h"
#include "launch/output/sink.h"

namespace lockstep {

/// One rank's output. It is read from two pipes, written line by line to the rank's log and, if the rank is shown,
/// passed on: byte by byte to a sink, or line by line to a merger in front of one.
class RankOutput {
 public:
  /// One of the two streams. It has no pipe once it has ended.
  struct Stream {
    FileDescriptor pipe;
    Sink* sink = nullptr;  ///< null: it is not shown
    LineMerger* merger = nullptr;
    LineSplitter lines;

    /// Whether there is a pipe to poll and room for its data.
    bool wanted() const { return pipe && !(sink != nullptr && sink->full()); }
  };

  RankOutput(int rank, std::string log_path) : rank_(rank), log_(std::move(log_path)) {}

  /// Makes a stream's pipe and returns the rank's end. Throws LaunchError.
  FileDescriptor open(Stream& stream);

  std::array<Stream, 2>& streams() { return streams_; }
  /// Reads one piece.
  void read(Stream& stream);
  /// Takes a piece that arrived by other means than the pipe.
  void take(Stream& stream, std::string_view bytes);
  /// From now on passes data to `forward`, with the stream's number, instead of keeping it. Empty data marks the end of
  /// the stream.
  void forward(std::function<void(size_t stream, std::string_view bytes)> forward) { forward_ = std::move(forward); }
  /// Reads all that the pipes hold, ends the last lines and closes the pipes.
  /// REQUIRES: the rank is gone.
  void finish();

  const Tail& tail() const { return tail_; }
  const RankLog& log() const { return log_; }

 private:
  void keep(Stream& stream, std::string_view lines);

  const int rank_;
  RankLog log_;
  std::array<Stream, 2> streams_;
  std::function<void(size_t, std::string_view)> forward_;
  Tail tail_;
};

}  // namespace lockstep
