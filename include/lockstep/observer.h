#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// Something that took time on one rank.
struct Span {
  std::string name;      ///< "backward", "bucket 2", "wait"
  std::string lane;      ///< spans of one lane do not overlap
  int64_t begin_ns = 0;  ///< of the machine's steady clock, which all its processes share
  int64_t end_ns = 0;
  std::vector<std::pair<std::string, std::string>> facts;  ///< name and value
};

/// Is told what happens. Called on the thread that works; must not throw.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void span(const Span& span) = 0;
};

/// Writes spans as a Chrome trace (JSON array format; chrome://tracing and Perfetto read it), one file a rank; files of
/// one machine can be put together, since they share the clock. `path` is overwritten; Error if it cannot be. A disk
/// that fills up later ends the trace, not the training.
[[nodiscard]] std::shared_ptr<Observer> chrome_trace(const std::string& path, int rank);

}  // namespace lockstep
