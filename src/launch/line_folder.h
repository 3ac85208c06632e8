#pragma once

#include <cstddef>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "launch/sink.h"

namespace lockstep {

/// Shows the lines of several ranks on one sink, each after the ranks that printed it: "[2] line". A line waits up to
/// kWindow for the other ranks to print the same, and is then shown once: "[0-3] line". Each rank's lines stay in their
/// order.
class LineFolder {
 public:
  static constexpr std::chrono::milliseconds kWindow{100};
  static constexpr size_t kMaxWaiting = 256;

  /// `ranks`: whose lines will come.
  LineFolder(Sink& sink, std::vector<int> ranks);

  /// Whole lines of one rank.
  void add(int rank, std::string_view lines, Clock::time_point now);
  /// Shows what has waited long enough.
  void release(Clock::time_point now);
  /// Shows all.
  void finish();
  /// When release() has something to do; empty while nothing waits.
  std::optional<Clock::time_point> due() const;

 private:
  struct Waiting {
    std::string line;
    std::vector<int> ranks;  ///< ascending
    Clock::time_point until;
  };

  void add_line(int rank, std::string_view line, Clock::time_point now);
  size_t insert(size_t at, std::string_view line, Clock::time_point now);
  void show_first();

  Sink& sink_;
  const std::vector<int> ranks_;
  std::deque<Waiting> waiting_;  // oldest first
  size_t shown_ = 0;             // lines that have left waiting_
  std::map<int, size_t> next_;   // by rank: the number, counted over all lines, of the first that may be its next
};

}  // namespace lockstep
