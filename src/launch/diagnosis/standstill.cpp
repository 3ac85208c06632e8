#include "launch/diagnosis/standstill.h"

#include <algorithm>

namespace lockstep {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Time between two looks counts as idle no further than this: the launcher may have been stopped itself.
constexpr seconds kMostIdleAtOnce(2);
constexpr seconds kLookEvery(1);
/// Of processor times: sparse, since each looks at all processes.
constexpr seconds kFirstSample(2), kSampleEvery(5);
/// By which ranks whose collective has taken too long should have said so themselves.
constexpr seconds kGiveUpTime(30);

}  // namespace

bool Standstill::wants_sample(Clock::duration hang_timeout) const {
  if (beats.empty()) return false;
  const Clock::duration next = idle + kLookEvery;
  if (samples == 0) return next >= std::min<Clock::duration>(kFirstSample, hang_timeout / 5);
  return next - sampled >= std::min<Clock::duration>(kSampleEvery, hang_timeout / 20);
}

bool Standstill::look(const std::vector<RankView>& views, bool has_sample, Clock::time_point now) {
  auto seen = progress_of(views);
  const bool moved = seen.empty() || seen != beats;
  if (moved) {
    beats = std::move(seen);
    ranks.assign(views.size(), Rank{});
    idle = sampled = Clock::duration(0);
    samples = 0;
  } else {
    const Clock::duration passed = std::min<Clock::duration>(now - looked, kMostIdleAtOnce);
    idle += passed;
    for (Rank& rank : ranks) rank.still += passed;
  }
  looked = now;
  if (has_sample) take_sample(views);
  return moved;
}

void Standstill::take_sample(const std::vector<RankView>& views) {
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto known = views[i].processor_time, before = ranks[i].processor_time;
    ranks[i].processor_time = known;
    const Clock::duration used =
        known && before ? std::max<Clock::duration>(*known - *before, Clock::duration(0)) : Clock::duration(0);
    const auto worth = std::chrono::duration_cast<Clock::duration>(used / kComputes);
    ranks[i].computes = used > Clock::duration(0) && worth >= idle - sampled && may_be_awaited(views[i]);
    ranks[i].still = std::max<Clock::duration>(ranks[i].still - worth, Clock::duration(0));
  }
  ++samples;
  sampled = idle;
}

std::vector<bool> Standstill::computing() const {
  std::vector<bool> computing;
  for (const Rank& rank : ranks) computing.push_back(rank.computes);
  return computing;
}

bool Standstill::is_hang(const std::vector<RankView>& views, Clock::duration hang_timeout) const {
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
