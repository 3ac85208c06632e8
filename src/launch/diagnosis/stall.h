#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "rank_page/rank_page.h"

namespace lockstep {

/// The launcher's observations of a rank, and the contents of the rank's page.
struct RankView {
  RankStatus account;
  bool ended = false;
  bool outlived = false;   ///< it has ended, but a process that it started lives, which may be the actual rank
  char process_state = 0;  ///< as in /proc/<pid>/stat: 'T' is stopped; 0: not read
  /// Processor time of its processes so far (processor_times()); empty if not sampled or not visible.
  std::optional<Clock::duration> processor_time;
  std::string missing_library;  ///< not found by the dynamic loader, by the last lines of an ended rank
};

bool is_stopped(const RankView& rank);
/// Whether its page does not show that it has joined the others.
bool is_before_join(const RankStatus& account);
/// Whether it has joined, so that others may need it.
bool takes_part(const RankView& rank);
bool waits(const RankView& rank);
/// Whether it runs and does not wait in a collective: if it computes, it may still reach the collective in which others
/// wait.
bool may_be_awaited(const RankView& rank);

/// A deadlock or hang of ranks.
struct Stall {
  enum class Kind { kStays, kComputes, kStopped, kAllWait, kGroupOrder };
  Kind kind = Kind::kStays;        ///< the culprit's behaviour: it stays away, ...; kGroupOrder: it is in a GroupCycle
  int culprit = -1;                ///< the rank that the others need
  std::string what;                ///< "rank 2 is STOPPED", "rank 1 has not reached all_reduce #12"
  std::vector<std::string> lines;  ///< activity of each rank, at most kLines
  static constexpr size_t kLines = 16;
};

/// Finds the rank that holds up the others, for ranks that have made no progress for a while. Empty if nothing is
/// wrong: no rank waits in a collective, and no process is stopped.
/// `computing` tells by rank whether it uses its processor; empty: none does.
std::optional<Stall> diagnose(const std::vector<RankView>& ranks, const std::vector<bool>& computing = {});

}  // namespace lockstep
