#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "launch/output/line_merger.h"
#include "launch/output/rank_output.h"
#include "launch/output/sink.h"

namespace lockstep {

/// The launcher's own stdout and stderr: the output of shown ranks, and its own messages. The output of a single shown
/// rank is forwarded byte by byte, the output of several line by line (see LineMerger).
class Display {
 public:
  /// `shown_ranks`: ascending.
  explicit Display(std::vector<int> shown_ranks);

  void connect(int rank, RankOutput& output);
  /// The width of the terminal that shows this rank's output byte by byte; empty if none.
  std::optional<int> columns_for(int rank) const;

  /// Prints a message of the launcher to stderr, but not in the middle of a rank's line.
  void print(const std::string& lines);

  Sink& out() { return out_; }
  Sink& err() { return err_; }
  /// Whether output remains to be written.
  bool pending() const { return out_.pending() || err_.pending(); }
  /// The next time at which tick() has work; empty if none.
  std::optional<Clock::time_point> due() const;
  void tick();
  /// Called when the ranks have ended: shows the waiting lines.
  void finish();
  /// Whether the terminal on which the launcher was started is gone.
  bool terminal_is_gone() const;

  /// "12 bytes of ... nothing read them", for the user; empty if everything was shown.
  std::string losses() const;

 private:
  const std::vector<int> shown_;
  Sink out_{1}, err_{2};
  LineMerger merged_out_{out_, shown_}, merged_err_{err_, shown_};
};

}  // namespace lockstep
