#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// An interval of time on one rank.
struct Span {
  std::string name{};    ///< "backward", "bucket 2", "wait"
  std::string lane{};    ///< spans in one lane do not overlap
  int64_t begin_ns = 0;  ///< on the machine's steady clock, which all its processes share
  int64_t end_ns = 0;
  std::vector<std::pair<std::string, std::string>> facts{};  ///< name and value
};

/// Receives spans. Called on the thread that does the work; must not throw.
class Observer {
 public:
  virtual ~Observer() = default;
  virtual void span(const Span& span) = 0;
};

/// Writes spans as a Chrome trace (JSON array format; chrome://tracing and Perfetto read it), one file per rank. Files
/// of one machine can be merged, because they share the clock. Overwrites `path`; throws Error if that is impossible.
/// If the disk fills up later, the trace ends, but training goes on.
[[nodiscard]] std::shared_ptr<Observer> chrome_trace(const std::string& path, int rank);

}  // namespace lockstep
