#pragma once

#include <optional>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/stall.h"

namespace lockstep {

/// Ranks of which no page has moved for a while, and whether one of them computes all the same.
///
/// A rank computes that uses kComputes of a processor or more, with all that it has started, and does not sit in a wait
/// for a collective, where it may spin. `still` counts the time in which it does not: a second of processor time takes
/// 1 / kComputes seconds off it. So one that has computed for an hour and then sleeps for ever has stood still for as
/// long as it sleeps, and a thread that wakes once a minute to look at something does not pass for work.
struct Standstill {
  static constexpr double kComputes = 0.01;

  struct Rank {
    std::optional<Clock::duration> processor_time;  ///< at the last sample
    Clock::duration still{0};
    bool computes = false;  ///< between the last two samples
  };

  std::vector<uint64_t> beats;
  Clock::duration idle{0};  ///< nothing has moved for so long
  Clock::time_point looked;
  std::vector<Rank> ranks;
  int samples = 0;             ///< of processor times, in this standstill
  Clock::duration sampled{0};  ///< `idle` at the last of them

  /// Whether the next look should have sample processor times, which costs a look at every process of the machine.
  bool wants_sample(Clock::duration hang_timeout) const;
  /// What the ranks are at now; `sampled`: their processor times were asked for. Whether something has moved.
  bool look(const std::vector<RankView>& views, bool sampled, Clock::time_point now);
  /// By rank: who computes.
  std::vector<bool> computing() const;
  /// Whether ranks that have stood still for `hang_timeout` will not go on: one is stopped, or all that others may wait
  /// for have not computed for so long, or those that wait should have given up by themselves.
  bool is_hang(const std::vector<RankView>& views, Clock::duration hang_timeout) const;

 private:
  void take_sample(const std::vector<RankView>& views);
};

}  // namespace lockstep
