#include "hosts/contributions.h"

#include <algorithm>
#include <utility>

namespace lockstep::hosts {

std::vector<CountedSteps::Counted> CountedSteps::last(int island, int fragments) const {
  std::vector<Counted> last(static_cast<size_t>(fragments));
  const auto found = counted_.find(island);
  if (found == counted_.end()) return last;
  int missing = fragments;
  for (auto one = found->second.rbegin(); one != found->second.rend() && missing > 0; ++one) {
    Counted& of_fragment = last[static_cast<size_t>(one->round % fragments)];
    if (of_fragment.round > 0) continue;
    of_fragment = *one;
    --missing;
  }
  return last;
}

void CountedSteps::go_back(int64_t round) {
  for (auto& [island, all] : counted_) std::erase_if(all, [&](const Counted& one) { return one.round > round; });
}

void OpenRounds::add(int64_t round, int island, Contribution one) {
  Round& open = rounds_[round];
  if (!open.sent.try_emplace(island, std::move(one)).second) return;
  open.last = Clock::now();
  if (!open.first) open.first = open.last;
}

bool OpenRounds::has_any_of(int island) const {
  return std::any_of(rounds_.begin(), rounds_.end(), [&](const auto& one) { return one.second.sent.contains(island); });
}

const OpenRounds::Round& OpenRounds::at(int64_t round) const {
  static const Round nothing;
  const auto found = rounds_.find(round);
  return found == rounds_.end() ? nothing : found->second;
}

OpenRounds::Round OpenRounds::take(int64_t round) {
  auto taken = rounds_.extract(round);
  return taken.empty() ? Round{} : std::move(taken.mapped());
}

void OpenRounds::drop_all_of(int island) {
  for (auto& [round, open] : rounds_) open.sent.erase(island);
}

}  // namespace lockstep::hosts
