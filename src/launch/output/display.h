#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "launch/output/line_folder.h"
#include "launch/output/rank_output.h"
#include "launch/output/sink.h"

namespace lockstep {

/// What comes to the launcher's own stdout and stderr: the output of the ranks that are shown, and its own messages.
/// One rank that is shown alone is passed on byte by byte, several line by line (see LineFolder).
class Display {
 public:
  /// Ascending.
  explicit Display(std::vector<int> shown_ranks);

  /// Lets `output` show here if it is of a rank that is shown.
  void connect(int rank, RankOutput& output);
  /// Columns of the terminal that shows this rank as it is; empty where there is none.
  std::optional<int> columns_for(int rank) const;

  /// A message of the launcher's: to stderr, and not into the middle of a rank's line.
  void print(const std::string& lines);

  Sink& out() { return out_; }
  Sink& err() { return err_; }
  /// Something is still to be written.
  bool pending() const { return out_.pending() || err_.pending(); }
  /// When tick() has something to do; empty: not by time.
  std::optional<Clock::time_point> due() const;
  void tick();
  /// The ranks have ended: shows what waits.
  void finish();
  /// The terminal that the launcher was started on is gone.
  bool terminal_is_gone() const;

  /// "12 bytes of ... found no reader" for the report; empty where all was shown.
  std::string losses() const;

 private:
  const std::vector<int> shown_;
  Sink out_{1}, err_{2};
  LineFolder folded_out_{out_, shown_}, folded_err_{err_, shown_};
};

}  // namespace lockstep
