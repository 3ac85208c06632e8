#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/group_order.h"
#include "launch/diagnosis/stall.h"

namespace lockstep {

/// The progress of each rank, for comparison with a later look. Empty if the ranks do not use their pages.
std::vector<uint64_t> progress_of(const std::vector<RankView>& ranks);

/// Watches for ranks whose pages no longer change, and distinguishes those that compute from those that hang.
///
/// A rank computes if it uses at least kComputes of a processor, with all its child processes, and does not wait in a
/// collective, where it may spin. `still` is the time in which it does not compute: a second of processor time reduces
/// it by 1 / kComputes seconds. So a rank that computed for an hour and then sleeps forever has been still for as long
/// as it sleeps, and a thread that wakes up once a minute for a check does not count as work.
struct ProgressMonitor {
  static constexpr double kComputes = 0.01;
  static constexpr std::chrono::seconds kLookEvery{1};
  static constexpr double kBusy = 0.2;
  /// Ranks of a GroupCycle cannot continue. The patience only ensures, by two samples, that their pages are current and
  /// that no thread that has called no collective yet computes.
  static constexpr std::chrono::seconds kCyclePatience{8};
  /// A rank with a shorter timeout gets its own error, which it may catch.
  static constexpr std::chrono::seconds kOwnTimeout{30};

  struct Rank {
    std::optional<Clock::duration> processor_time;  ///< at the last sample
    Clock::duration still{0};
    bool computes = false;  ///< between the last two samples
    bool is_busy = false;   ///< as `computes`, for kBusy of a processor: more than a wait needs
  };

  std::vector<uint64_t> beats;
  Clock::duration idle{0};  ///< how long no page has changed
  Clock::time_point last_look;
  std::vector<Rank> ranks;
  int samples = 0;             ///< of processor times, since a page changed
  Clock::duration sampled{0};  ///< `idle` at the last sample
  std::optional<GroupCycle> cycle;
  Clock::duration in_cycle{0};  ///< how long `cycle` has been the same

  /// Whether the next look should sample processor times, which inspects every process of the machine.
  bool wants_sample(Clock::duration hang_timeout) const;
  /// Records the ranks' current views. `sampled`: with their processor times. Returns whether a page has changed.
  bool update(const std::vector<RankView>& views, bool sampled, Clock::time_point now);
  std::vector<bool> computing() const;
  /// Whether ranks that have been idle for `hang_timeout` will not continue: one is stopped; or all that others may
  /// wait for have not computed for as long; or waiting ranks should have given up by themselves.
  bool is_hang(const std::vector<RankView>& views, Clock::duration hang_timeout) const;
  /// Whether ranks wait for each other in different groups, which no patience resolves.
  bool is_cycle(const std::vector<RankView>& views) const;

 private:
  void take_sample(const std::vector<RankView>& views);
};

}  // namespace lockstep
