#pragma once

#include <functional>
#include <random>
#include <string>

#include "collectives/shm/weak_memory.h"

namespace lockstep::shm {

/// Of executions of some ranks on weak memory.
struct WeakOutcome {
  int executions = 0;
  uint64_t stale_loads = 0;
  std::string wrong;  ///< of the last execution; empty: none was
};

/// Up to `executions` of them, or until one goes wrong: `body(rank, wrong)` says so, a rank is stuck, or there is a
/// race. `start` makes what ranks share anew, before each.
inline WeakOutcome explore(WeakMemory& memory, int ranks, int executions, const Dropped& dropped,
                           const std::function<void()>& start,
                           const std::function<void(int rank, std::string& wrong)>& body) {
  constexpr unsigned kStay[] = {1, 3, 10, 40, 150};
  Scheduler scheduler(ranks);
  WeakOutcome outcome;
  while (outcome.executions < executions && outcome.wrong.empty()) {
    const auto seed = static_cast<unsigned>(outcome.executions++);
    std::mt19937 random(seed);
    start();
    memory.begin(seed, dropped);
    scheduler.run_at_random([&](int rank) { body(rank, outcome.wrong); }, /*victim=*/-1, 0, random, kStay[seed % 5]);
    outcome.stale_loads += memory.stale_loads();
    for (int rank = 0; rank < ranks; ++rank)
      if (outcome.wrong.empty() && !scheduler.finished(rank)) outcome.wrong = "somebody is stuck";
    if (outcome.wrong.empty()) outcome.wrong = memory.race();
  }
  return outcome;
}

}  // namespace lockstep::shm
