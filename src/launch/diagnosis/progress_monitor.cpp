#include "launch/diagnosis/progress_monitor.h"

#include <algorithm>

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Time between two looks counts as idle up to this: the launcher itself may have been stopped.
constexpr seconds kMostIdleAtOnce(2);
/// Samples of processor times are rare, since each looks at all processes.
constexpr seconds kFirstSample(2), kSampleEvery(5);
/// After its timeout a collective should fail within this time.
constexpr seconds kGiveUpTime(30);

}  // namespace

std::vector<uint64_t> progress_of(const std::vector<RankView>& ranks) {
  std::vector<uint64_t> beats;
  for (const auto& rank : ranks) beats.push_back(rank.account.beats);
  return std::any_of(ranks.begin(), ranks.end(), takes_part) ? beats : std::vector<uint64_t>();
}

bool ProgressMonitor::wants_sample(Clock::duration hang_timeout) const {
  if (beats.empty()) return false;
  const Clock::duration next = idle + kLookEvery;
  if (samples == 0) return next >= std::min<Clock::duration>(kFirstSample, hang_timeout / 5);
  return next - sampled >= std::min<Clock::duration>(kSampleEvery, hang_timeout / 20);
}

bool ProgressMonitor::update(const std::vector<RankView>& views, bool has_sample, Clock::time_point now) {
  auto seen = progress_of(views);
  const bool moved = seen.empty() || seen != beats;
  if (moved) {
    beats = std::move(seen);
    ranks.assign(views.size(), Rank{});
    idle = sampled = Clock::duration(0);
    samples = 0;
  } else {
    const Clock::duration passed = std::min<Clock::duration>(now - last_look, kMostIdleAtOnce);
    idle += passed;
    for (Rank& rank : ranks) rank.still += passed;
    in_cycle += passed;
  }
  if (auto found = find_group_cycle(views); moved || found != cycle) {
    cycle = std::move(found);
    in_cycle = Clock::duration(0);
  }
  last_look = now;
  if (has_sample) take_sample(views);
  return moved;
}

void ProgressMonitor::take_sample(const std::vector<RankView>& views) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto known = views[i].processor_time, before = ranks[i].processor_time;
    ranks[i].processor_time = known;
    const Clock::duration used =
        known && before ? std::max<Clock::duration>(*known - *before, Clock::duration(0)) : Clock::duration(0);
    const auto worth = std::chrono::duration_cast<Clock::duration>(used / kComputes);
    ranks[i].is_busy = used > (idle - sampled) * kBusy;
    ranks[i].computes = used > Clock::duration(0) && worth >= idle - sampled && may_be_awaited(views[i]);
    ranks[i].still = std::max<Clock::duration>(ranks[i].still - worth, Clock::duration(0));
  }
  ++samples;
  sampled = idle;
}

bool ProgressMonitor::is_cycle(const std::vector<RankView>& views) const {
  if (!cycle || in_cycle < kCyclePatience || samples < 2) return false;
  return std::none_of(cycle->waits.begin(), cycle->waits.end(), [&](const GroupCycle::Wait& wait) {
    const auto rank = static_cast<size_t>(wait.rank);
    const milliseconds timeout = views[rank].account.collective_timeout;
    return ranks[rank].is_busy || (timeout > milliseconds(0) && timeout < kOwnTimeout);
  });
}

std::vector<bool> ProgressMonitor::computing() const {
  std::vector<bool> computing;
  for (const Rank& rank : ranks) computing.push_back(rank.computes);
  return computing;
}

bool ProgressMonitor::is_hang(const std::vector<RankView>& views, Clock::duration hang_timeout) const {
  if (idle < hang_timeout) return false;
  Clock::duration patience = hang_timeout;
  bool bounded = true, stopped = false, computes = false;
  for (size_t i = 0; i < views.size(); ++i) {
    stopped = stopped || (takes_part(views[i]) && is_stopped(views[i]));
    computes = computes || (may_be_awaited(views[i]) && (samples < 2 || ranks[i].still < hang_timeout));
    if (!waits(views[i])) continue;
    bounded = bounded && views[i].account.collective_timeout > milliseconds(0);
    patience = std::max<Clock::duration>(patience, views[i].account.collective_timeout);
  }
  return stopped || !computes || (bounded && idle >= patience + kGiveUpTime);
}

}  // namespace lockstep
