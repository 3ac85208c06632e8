#include "faultbox/starvation.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <string>

namespace lockstep::faultbox {
namespace {

constexpr int64_t kEvery = 20'000'000;

}  // namespace

void Starvation::add(Samples& samples, pid_t pid, int64_t now) {
  int64_t ran = 0, waited = 0;
  if (std::ifstream("/proc/" + std::to_string(pid) + "/schedstat") >> ran >> waited) samples.push_back({now, waited});
}

void Starvation::look(pid_t launcher, const std::vector<pid_t>& ranks, int64_t now) {
  if (now - looked_ns_ < kEvery) return;
  looked_ns_ = now;
  add(launcher_, launcher, now);
  for (const pid_t rank : ranks) add(ranks_[rank], rank, now);
}

int64_t Starvation::growth(const Samples& samples, int64_t since) {
  if (samples.empty()) return 0;
  const auto after =
      std::partition_point(samples.begin(), samples.end(), [&](const Sample& sample) { return sample.at_ns <= since; });
  return samples.back().waited_ns - (after == samples.begin() ? 0 : std::prev(after)->waited_ns);
}

int64_t Starvation::since(int64_t instant) const {
  std::vector<int64_t> longest = {0, 0};
  for (const auto& [pid, samples] : ranks_) longest.push_back(growth(samples, instant));
  std::partial_sort(longest.begin(), longest.begin() + 2, longest.end(), std::greater<>());
  return growth(launcher_, instant) + longest[0] + longest[1];
}

}  // namespace lockstep::faultbox
