#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/group_order.h"
#include "launch/diagnosis/stall.h"

namespace lockstep {

/// How far each rank has come, to compare with a later look. Empty where the ranks do not use their pages.
std::vector<uint64_t> progress_of(const std::vector<RankView>& ranks);

/// Watches for ranks whose pages no longer change, and tells those that compute from those that hang.
///
/// A rank computes if it uses kComputes of a processor or more, with all processes that it has started, and does not
/// wait in a collective, where it may spin. `still` is the time in which it does not compute: a second of processor
/// time takes 1 / kComputes seconds off it. So a rank that computed for an hour and then sleeps for ever has been still
/// for as long as it sleeps, and a thread that wakes up once a minute to check something does not pass for work.
struct ProgressMonitor {
  static constexpr double kComputes = 0.01;
  static constexpr std::chrono::seconds kLookEvery{1};
  static constexpr double kBusy = 0.2;
  /// Ranks of a GroupCycle cannot go on, so they need no more patience than it takes to be sure that what the pages say
  /// is not of the past, and that no thread which has called no collective yet computes: two samples.
  static constexpr std::chrono::seconds kCyclePatience{8};
  /// A rank with a shorter timeout gets its own error, which it may catch.
  static constexpr std::chrono::seconds kOwnTimeout{30};

  struct Rank {
    std::optional<Clock::duration> processor_time;  ///< at the last sample
    Clock::duration still{0};
    bool computes = false;  ///< between the last two samples
    bool is_busy = false;   ///< the same, of kBusy of a processor: more than a wait needs
  };

  std::vector<uint64_t> beats;
  Clock::duration idle{0};  ///< how long no page has changed
  Clock::time_point last_look;
  std::vector<Rank> ranks;
  int samples = 0;             ///< of processor times, since a page changed
  Clock::duration sampled{0};  ///< `idle` at the last sample
  std::optional<GroupCycle> cycle;
  Clock::duration in_cycle{0};  ///< how long `cycle` has been the same

  /// Whether the next look should sample processor times, which takes a look at every process of the machine.
  bool wants_sample(Clock::duration hang_timeout) const;
  /// Takes what the ranks are doing now; `sampled`: with their processor times. Returns whether a page has changed.
  bool update(const std::vector<RankView>& views, bool sampled, Clock::time_point now);
  /// By rank: whether it computes.
  std::vector<bool> computing() const;
  /// Whether ranks that have been idle for `hang_timeout` will not go on: one is stopped; or all that others may wait
  /// for have not computed for as long; or those that wait should have given up by themselves.
  bool is_hang(const std::vector<RankView>& views, Clock::duration hang_timeout) const;
  /// Whether ranks wait for each other in different groups, which no patience ends.
  bool is_cycle(const std::vector<RankView>& views) const;

 private:
  void take_sample(const std::vector<RankView>& views);
};

}  // namespace lockstep
