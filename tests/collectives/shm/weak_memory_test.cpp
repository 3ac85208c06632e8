#include "collectives/shm/weak_memory.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "collectives/shm/scenario.h"
#include "collectives/shm/segment/futex.h"

// The collectives on memory that is as weak as ARM's or weaker (weak_memory.h), in executions drawn at random: every
// order that the sources ask for is enough, and every one that is left out on purpose is missed.

namespace lockstep {

// Without an end: a wake-up that is lost is a rank that is stuck.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::chrono::microseconds) {
  const auto* now = reinterpret_cast<const uint32_t*>(&word);
  shm::Scheduler::active->wait_until([=] { return __atomic_load_n(now, __ATOMIC_SEQ_CST) != expected; });
}
void futex_wake_all(const std::atomic<uint32_t>&) {}

namespace shm {
namespace {

/// Where in a segment.
struct {
  size_t begin, end, each;
} boxes;

std::string name_of(size_t, size_t offset) {
  const struct {
    const char* name;
    size_t at;
  } kWords[] = {{"verdict", offsetof(Control, verdict)},
                {"awaited", offsetof(Control, awaited)},
                {"bell", offsetof(Control, bell)},
                {"filled", offsetof(Control, filled)},
                {"reduced", offsetof(Control, reduced)},
                {"drained", offsetof(Control, drained)},
                {"finished", offsetof(Control, finished)},
                {"closed", offsetof(Control, closed)},
                {"stopped_at", offsetof(Control, stopped_at)}};
  for (const auto& word : kWords)
    if (offset == word.at) return word.name;
  const auto within = [&](size_t at, size_t bytes) { return offset >= at && offset < at + bytes; };
  if (within(offsetof(Control, ring), sizeof(Control::ring)))
    return (offset - offsetof(Control, ring)) % sizeof(Line) == 0 ? "announcement" : "a line";
  if (within(offsetof(Control, written), sizeof(Control::written))) return "written";
  if (within(offsetof(Control, consumed), sizeof(Control::consumed))) return "consumed";
  if (within(offsetof(Control, received), sizeof(Control::received))) return "received";
  if (within(boxes.begin, boxes.end - boxes.begin))
    return (offset - boxes.begin) % boxes.each == 0 ? "box" : "what is in a box";
  return "byte " + std::to_string(offset);
}

struct Case {
  const char* name;
  int ranks;
  Kind first, second;
  int warm_up;
  size_t chunks;
  bool sleeps;
};

constexpr Case kCases[] = {
    {"Inline", 2, Kind::kInlineReduce, Kind::kInlineReduce, 31, 2, false},
    {"Eager", 2, Kind::kEagerReduce, Kind::kBroadcast, 0, 2, false},
    {"Cold", 2, Kind::kColdBroadcast, Kind::kColdBroadcast, 0, 2, false},
    {"InPlace", 2, Kind::kInPlace, Kind::kInlineReduce, 0, 2, false},
    {"Staged", 2, Kind::kStagedReduce, Kind::kStagedReduce, 0, 2, false},
    {"Rounds", 2, Kind::kThreeRounds, Kind::kThreeRounds, 0, 2, false},
    {"OneWay", 2, Kind::kBroadcastInRounds, Kind::kAllToAllInRounds, 31, 1, false},
    {"OneWayTwice", 2, Kind::kBroadcastInRounds, Kind::kBroadcastInRounds, 0, 1, false},
    {"Messages", 2, Kind::kLongMessage, Kind::kInlineReduce, 0, 2, false},
    {"ManyMessages", 2, Kind::kManyMessages, Kind::kNothing, 0, 2, false},
    {"InlineOfThree", 3, Kind::kInlineReduce, Kind::kBarrier, 31, 2, false},
    {"InPlaceOfThree", 3, Kind::kInPlace, Kind::kEagerReduce, 31, 2, false},
    {"StagedOfThree", 3, Kind::kStagedReduce, Kind::kEagerReduce, 31, 2, false},
    {"RoundsOfThree", 3, Kind::kThreeRounds, Kind::kBroadcastInRounds, 0, 1, false},
    {"Asleep", 2, Kind::kInlineReduce, Kind::kThreeRounds, 0, 2, true},
    {"AsleepOverMessages", 2, Kind::kLongMessage, Kind::kInPlace, 0, 2, true},
    {"AsleepOverManyMessages", 2, Kind::kManyMessages, Kind::kInPlace, 0, 2, true},
    {"AsleepOfThree", 3, Kind::kInPlace, Kind::kThreeRounds, 0, 1, true},
};

const Case& case_of(const std::string& name) {
  for (const Case& one : kCases)
    if (name == one.name) return one;
  throw std::logic_error("no case " + name);
}

struct Outcome {
  int executions = 0;
  uint64_t stale_loads = 0;
  std::string wrong;  ///< of the last execution; empty: none was
};

/// Up to `executions` of them, or until one goes wrong.
Outcome explore(const Case& what, int executions, const Dropped& dropped = {}) {
  Scenario scenario(what.ranks, what.first, what.second, what.warm_up, what.chunks);
  Scheduler scheduler(what.ranks);
  const Geometry& geometry = scenario.memory().geometry();
  boxes = {geometry.box_at(0, 0), geometry.box_at(what.ranks, 0), geometry.box_bytes};
  WeakMemory memory(what.ranks, name_of);
  for (const auto& segment : scenario.memory().segments()) memory.track(segment->data(), segment->size());
  Outcome outcome;
  while (outcome.executions < executions && outcome.wrong.empty()) {
    const auto seed = static_cast<unsigned>(outcome.executions++);
    std::mt19937 random(seed);
    constexpr unsigned kStay[] = {1, 3, 10, 40};
    scenario.prepare();
    memory.begin(seed, dropped);
    scheduler.run_at_random([&](int rank) { what.sleeps ? scenario.sleeping_body(rank) : scenario.body(rank); },
                            /*victim=*/-1, 0, random, kStay[seed % 4]);
    outcome.stale_loads += memory.stale_loads();
    outcome.wrong = memory.race().empty() ? scenario.verdict(scheduler, -1) : memory.race();
    scenario.clear();
  }
  return outcome;
}

class WeakMemoryCases : public ::testing::TestWithParam<Case> {};

TEST_P(WeakMemoryCases, NeedNoMoreOrderThanTheyAskFor) {
  const int executions = std::getenv("LOCKSTEP_NIGHTLY") != nullptr ? 20'000 : 300;
  const Outcome outcome = explore(GetParam(), executions);
  EXPECT_EQ(outcome.wrong, "") << "in the execution with seed " << outcome.executions - 1;
  EXPECT_GT(outcome.stale_loads, 0u);
  std::printf("%d executions, %llu loads of overwritten values\n", outcome.executions,
              static_cast<unsigned long long>(outcome.stale_loads));
}

INSTANTIATE_TEST_SUITE_P(Cases, WeakMemoryCases, ::testing::ValuesIn(kCases),
                         [](const auto& one) { return std::string(one.param.name); });

struct Omission {
  const char* name;
  const char* within;  ///< the case that misses it
  Dropped dropped;
};

class WeakMemoryOmissions : public ::testing::TestWithParam<Omission> {};

TEST_P(WeakMemoryOmissions, AreFound) {
  const Outcome outcome = explore(case_of(GetParam().within), 2000, GetParam().dropped);
  EXPECT_NE(outcome.wrong, "") << "in " << outcome.executions << " executions";
  std::printf("found in execution %d: %s\n", outcome.executions, outcome.wrong.c_str());
}

using What = Dropped::What;
INSTANTIATE_TEST_SUITE_P(
    Orders, WeakMemoryOmissions,
    ::testing::Values(Omission{"AnnouncementRelease", "Inline", {"announcement", What::kRelease}},
                      Omission{"AnnouncementAcquire", "Inline", {"announcement", What::kAcquire}},
                      Omission{"ReducedRelease", "InPlace", {"reduced", What::kRelease}},
                      Omission{"ReducedAcquire", "InPlace", {"reduced", What::kAcquire}},
                      Omission{"ReducedReleaseOfStaged", "Staged", {"reduced", What::kRelease}},
                      Omission{"ReducedReleaseOfRounds", "RoundsOfThree", {"reduced", What::kRelease}},
                      Omission{"FilledRelease", "Rounds", {"filled", What::kRelease}},
                      Omission{"FilledAcquire", "Rounds", {"filled", What::kAcquire}},
                      Omission{"DrainedRelease", "OneWay", {"drained", What::kRelease}},
                      Omission{"DrainedAcquire", "OneWay", {"drained", What::kAcquire}},
                      Omission{"FinishedRelease", "OneWayTwice", {"finished", What::kRelease}},
                      Omission{"FinishedAcquire", "OneWayTwice", {"finished", What::kAcquire}},
                      Omission{"WrittenRelease", "Messages", {"written", What::kRelease}},
                      Omission{"WrittenAcquire", "Messages", {"written", What::kAcquire}},
                      Omission{"ConsumedRelease", "Messages", {"consumed", What::kRelease}},
                      Omission{"ConsumedAcquire", "Messages", {"consumed", What::kAcquire}},
                      Omission{"BoxRelease", "ManyMessages", {"box", What::kRelease}},
                      Omission{"BoxAcquire", "ManyMessages", {"box", What::kAcquire}},
                      Omission{"ReceivedRelease", "ManyMessages", {"received", What::kRelease}},
                      Omission{"ReceivedAcquire", "ManyMessages", {"received", What::kAcquire}},
                      Omission{"FenceBeforeSleep", "Asleep", {"", What::kFences}},
                      Omission{"AwaitedSequential", "Asleep", {"awaited", What::kSequential}},
                      Omission{"AnnouncementSequential", "Asleep", {"announcement", What::kSequential}},
                      Omission{"WrittenSequential", "AsleepOverMessages", {"written", What::kSequential}},
                      Omission{"BoxSequential", "AsleepOverManyMessages", {"box", What::kSequential}},
                      Omission{"ReducedSequential", "AsleepOfThree", {"reduced", What::kSequential}}),
    [](const auto& one) { return std::string(one.param.name); });

}  // namespace
}  // namespace shm
}  // namespace lockstep
