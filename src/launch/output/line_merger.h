#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "launch/output/sink.h"

namespace lockstep {

/// Shows the lines of several ranks on one sink, each prefixed with the ranks that printed it: "[2] line". A line waits
/// up to kWindow for the other ranks to print the same line, and is then shown once: "[0-3] line". Each rank's lines
/// keep their order.
class LineMerger {
 public:
  static constexpr std::chrono::milliseconds kWindow{100};
  static constexpr size_t kMaxWaiting = 256;

  /// `ranks`: the ranks whose lines are shown.
  LineMerger(Sink& sink, std::vector<int> ranks);

  void add(int rank, std::string_view lines, Clock::time_point now);
  /// Shows lines that have waited long enough.
  void release(Clock::time_point now);
  /// Shows all lines.
  void finish();
  /// The next time at which release() has work; empty if no line waits.
  std::optional<Clock::time_point> due() const;

 private:
  struct Waiting {
    std::string line;
    std::vector<int> ranks;  ///< ascending
    Clock::time_point until;

    bool has(int rank) const { return std::binary_search(ranks.begin(), ranks.end(), rank); }
  };

  void add_line(int rank, std::string_view line, Clock::time_point now);
  /// The first position for the rank's next line.
  size_t after_the_last_of(int rank) const;
  /// Moves an equal line of other ranks from before `next` to just after the rank's last line, if the order of every
  /// rank's lines allows it. Returns its position, or the number of waiting lines if there is none.
  size_t move_behind(size_t next, int rank, std::string_view line);
  void show_first();

  Sink& sink_;
  const std::vector<int> ranks_;
  std::deque<Waiting> waiting_;  // in the order of showing; none waits longer than the next
};

}  // namespace lockstep
