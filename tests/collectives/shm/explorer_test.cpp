#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "collectives/shm/scenario.h"

// Interleavings of two and three ranks' accesses to shared words, on the real code, with and without a death.
//
// The sources are compiled a second time, with a word that hands control to this explorer before every access. Ranks
// are fibers of one thread; one execution is a list of choices of which rank runs. A rank that cannot go on sleeps
// until another rank has written something: that is what sleeping or spinning amounts to.
//
// Every interleaving, with a death at every step: two ranks and two operations of one exchange each. Executions are
// enumerated depth first; sleep sets leave out those that differ only in the order of accesses to different words or
// of reads. Without deaths also a broadcast between two ranks in three rounds through one chunk, and one exchange of
// three ranks.
//
// Drawn at random, from seeds that are printed when one fails: operations in several rounds, which reuse their chunks,
// and three ranks, one of which may die at a random step.
//
// Not explored: memory that is weaker than sequentially consistent, plain data between two accesses to words, sleeping
// on the futex (weak_memory_test.cpp has these three), and more ranks, operations and rounds than these.
namespace lockstep::shm {

void before_access(const void* word, bool writes) {
  if (Scheduler::active != nullptr) Scheduler::active->before_access(word, writes);
}

namespace {

struct Count {
  int executions = 0;
  int longest[kMostRanks] = {};
};

/// All interleavings in which `victim` (or nobody: -1) dies at its step `dies_at`.
Count explore(Scenario& scenario, int victim, int dies_at) {
  Scheduler scheduler(scenario.ranks());
  std::vector<int> choices;
  std::vector<std::vector<int>> rest;
  Count count;
  do {
    scenario.prepare();
    if (!scheduler.run([&](int rank) { scenario.body(rank); }, victim, dies_at, choices, rest)) {
      scenario.clear();
      continue;
    }
    ++count.executions;
    for (int r = 0; r < scenario.ranks(); ++r) count.longest[r] = std::max(count.longest[r], scheduler.steps(r));
    const std::string wrong = scenario.verdict(scheduler, victim);
    scenario.clear();
    if (!wrong.empty()) {
      std::string path;
      for (int choice : choices) path += static_cast<char>('0' + choice);
      ADD_FAILURE() << wrong << "; victim " << victim << " at step " << dies_at << "; order " << path;
      return count;
    }
  } while (scheduler.backtrack(choices, rest));
  return count;
}

class Explorer : public ::testing::TestWithParam<std::tuple<Kind, Kind, int>> {};

TEST_P(Explorer, EveryInterleavingWithADeathAtEveryStep) {
  const auto [first, second, warm_up] = GetParam();
  Scenario scenario(2, first, second, warm_up);
  const Count alive = explore(scenario, -1, 0);
  int executions = alive.executions;
  for (int victim = 0; victim < 2 && !HasFailure(); ++victim)
    for (int step = 0; step <= alive.longest[victim] && !HasFailure(); ++step)
      executions += explore(scenario, victim, step).executions;
  std::printf("%d executions without a death, %d in all; up to %d steps a rank\n", alive.executions, executions,
              alive.longest[0]);
  EXPECT_GT(alive.executions, 1);
}

// 31 barriers before: the first operation has a fresh line, the second reuses the first line of the ring.
INSTANTIATE_TEST_SUITE_P(Pairs, Explorer,
                         ::testing::Values(std::tuple(Kind::kInlineReduce, Kind::kInlineReduce, 0),
                                           std::tuple(Kind::kInlineReduce, Kind::kInlineReduce, 31),
                                           std::tuple(Kind::kEagerReduce, Kind::kEagerReduce, 0),
                                           std::tuple(Kind::kBroadcast, Kind::kInlineReduce, 31),
                                           std::tuple(Kind::kColdBroadcast, Kind::kColdBroadcast, 0),
                                           std::tuple(Kind::kInPlace, Kind::kInlineReduce, 0),
                                           std::tuple(Kind::kBarrier, Kind::kEagerReduce, 31),
                                           std::tuple(Kind::kInlineReduce, Kind::kMessage, 0),
                                           std::tuple(Kind::kStagedReduce, Kind::kInlineReduce, 0)));

class ExplorerOfOne : public ::testing::TestWithParam<std::tuple<int, Kind>> {};

// Rounds go through one chunk, so that the second reuses it.
TEST_P(ExplorerOfOne, EveryInterleavingOfOneOperation) {
  const auto [ranks, kind] = GetParam();
  Scenario scenario(ranks, kind, Kind::kNothing, 0, /*chunks=*/1);
  const Count alive = explore(scenario, -1, 0);
  std::printf("%d executions without a death; up to %d steps a rank\n", alive.executions, alive.longest[0]);
  EXPECT_GT(alive.executions, 1);
}

INSTANTIATE_TEST_SUITE_P(Kinds, ExplorerOfOne,
                         ::testing::Values(std::tuple(2, Kind::kBroadcastInRounds), std::tuple(3, Kind::kBarrier),
                                           std::tuple(3, Kind::kInlineReduce)));

struct Draw {
  int ranks;
  Kind first, second;
  int warm_up;
  size_t chunks;
};

class RandomExplorer : public ::testing::TestWithParam<Draw> {};

TEST_P(RandomExplorer, InterleavingsWithAndWithoutADeath) {
  const Draw& draw = GetParam();
  const int executions = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 100'000 : 2000;
  Scenario scenario(draw.ranks, draw.first, draw.second, draw.warm_up, draw.chunks);
  Scheduler scheduler(draw.ranks);
  int longest = 1, deaths = 0;
  for (int i = 0; i < executions && !HasFailure(); ++i) {
    std::mt19937 random(static_cast<unsigned>(i));
    // In the first executions nobody dies; they show how long a life is.
    const int victim = i % 2 == 0 ? -1 : static_cast<int>(random() % static_cast<unsigned>(draw.ranks));
    const int dies_at = static_cast<int>(random() % static_cast<unsigned>(longest));
    constexpr unsigned kStay[] = {1, 3, 10, 40};  // from a choice at every step to long runs of one rank
    scenario.prepare();
    scheduler.run_at_random([&](int rank) { scenario.body(rank); }, victim, dies_at, random, kStay[i / 2 % 4]);
    for (int r = 0; r < draw.ranks; ++r) longest = std::max(longest, scheduler.steps(r));
    deaths += victim >= 0 && scheduler.steps(victim) > dies_at;
    const std::string wrong = scenario.verdict(scheduler, victim);
    scenario.clear();
    if (!wrong.empty()) ADD_FAILURE() << wrong << "; victim " << victim << " at step " << dies_at << "; seed " << i;
  }
  std::printf("%d executions drawn, %d with a death; up to %d steps a rank\n", executions, deaths, longest);
}

INSTANTIATE_TEST_SUITE_P(Draws, RandomExplorer,
                         ::testing::Values(Draw{2, Kind::kThreeRounds, Kind::kThreeRounds, 0, 2},
                                           Draw{2, Kind::kThreeRounds, Kind::kBroadcastInRounds, 31, 1},
                                           Draw{2, Kind::kAllToAllInRounds, Kind::kInPlace, 0, 2},
                                           Draw{3, Kind::kInlineReduce, Kind::kInlineReduce, 31, 2},
                                           Draw{3, Kind::kInPlace, Kind::kEagerReduce, 31, 2},
                                           Draw{3, Kind::kInPlace, Kind::kThreeRounds, 0, 2},
                                           Draw{2, Kind::kManyMessages, Kind::kLongMessage, 0, 2},
                                           Draw{2, Kind::kManyMessages, Kind::kInPlace, 0, 2},
                                           Draw{2, Kind::kStagedReduce, Kind::kStagedReduce, 0, 2},
                                           Draw{3, Kind::kStagedReduce, Kind::kInPlace, 31, 2},
                                           Draw{3, Kind::kThreeRounds, Kind::kThreeRounds, 31, 2},
                                           Draw{3, Kind::kBroadcastInRounds, Kind::kThreeRounds, 0, 1},
                                           Draw{3, Kind::kAllToAllInRounds, Kind::kBroadcastInRounds, 0, 2},
                                           Draw{3, Kind::kColdBroadcast, Kind::kColdBroadcast, 31, 1},
                                           Draw{3, Kind::kBroadcast, Kind::kAllToAllInRounds, 31, 1}));

}  // namespace
}  // namespace lockstep::shm
