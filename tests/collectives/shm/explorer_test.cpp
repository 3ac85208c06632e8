#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "collectives/shm/group.h"

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
// Not explored: memory that is weaker than sequentially consistent (ThreadSanitizer and real processors cover that),
// plain data between two accesses to words, sleeping on the futex, and more ranks, operations and rounds than these.
namespace lockstep::shm {
namespace {

constexpr int kMostRanks = 3;
constexpr size_t kOneShot = kInlineBytes + 128;  ///< so that data behind, beside and without a copy are all small
struct Died {};

struct Access {
  const void* word = nullptr;  // null: any word, i.e. checking everything again
  bool writes = false;
};

bool conflict(const Access& a, const Access& b) {
  if (!a.writes && !b.writes) return false;
  return a.word == nullptr || b.word == nullptr || a.word == b.word;
}

struct Fiber {
  ucontext_t context{};
  std::vector<char> stack = std::vector<char>(256 << 10);
  std::function<void()> body;
  Access next;
  bool finished = false;
  bool die = false;          // at its next access
  uint64_t seen_writes = 0;  // idle until there are more
  bool idle = false;
  int steps = 0;
};

class Scheduler {
 public:
  explicit Scheduler(int ranks) : ranks_(ranks) {}
  static inline Scheduler* active = nullptr;

  /// One execution with random choices. About one in `stay` choices switches to another rank.
  void run_at_random(const std::function<void(int)>& body, int victim, int dies_at, std::mt19937& random,
                     unsigned stay) {
    begin(body);
    int chosen = 0;
    for (;;) {
      std::vector<int> enabled;
      for (int r = 0; r < ranks_; ++r)
        if (is_enabled(r)) enabled.push_back(r);
      if (enabled.empty()) break;
      if (!is_enabled(chosen) || random() % stay == 0) chosen = enabled[random() % enabled.size()];
      step(chosen, victim, dies_at);
    }
    end();
  }

  /// False if the execution was abandoned because every continuation is equivalent to one seen before.
  bool run(const std::function<void(int)>& body, int victim, int dies_at, std::vector<int>& choices,
           std::vector<std::vector<int>>& rest) {
    bool is_new = true;
    begin(body);
    std::vector<int> asleep;
    for (size_t depth = 0;; ++depth) {
      std::vector<int> enabled;
      for (int r = 0; r < ranks_; ++r)
        if (is_enabled(r)) enabled.push_back(r);
      if (enabled.empty()) break;
      if (depth == choices.size()) {
        std::vector<int> candidates;
        for (int r : enabled)
          if (std::find(asleep.begin(), asleep.end(), r) == asleep.end()) candidates.push_back(r);
        if (candidates.empty()) {
          is_new = false;
          break;
        }
        choices.push_back(candidates[0]);
        rest.push_back(candidates.size() > 1 ? std::vector<int>(candidates.begin() + 1, candidates.end())
                                             : std::vector<int>());
        explored_.resize(depth + 1);
        explored_[depth].clear();
      }
      const int chosen = choices[depth];
      for (int r : explored_[depth]) asleep.push_back(r);
      const Access access = fibers_[chosen].next;
      std::erase_if(asleep, [&](int r) { return r == chosen || conflict(fibers_[r].next, access); });
      step(chosen, victim, dies_at);
    }
    end();
    return is_new;
  }

  /// Takes the next alternative at the deepest choice that has one.
  bool backtrack(std::vector<int>& choices, std::vector<std::vector<int>>& rest) {
    while (!choices.empty() && rest.back().empty()) {
      choices.pop_back();
      rest.pop_back();
      explored_.pop_back();
    }
    if (choices.empty()) return false;
    explored_.back().push_back(choices.back());
    choices.back() = rest.back().back();
    rest.back().pop_back();
    return true;
  }

  void before_access(const void* word, bool writes) {
    pause({word, writes});
    if (writes) ++writes_;
  }
  /// Called by a rank that could not go on; returns when another rank has written since `since`.
  void idle(uint64_t since) {
    Fiber& fiber = fibers_[current_];
    fiber.idle = true;
    fiber.seen_writes = since;
    pause({nullptr, false});
    fiber.idle = false;
  }
  uint64_t writes() const { return writes_; }
  int steps(int rank) const { return fibers_[rank].steps; }
  bool finished(int rank) const { return finished_[rank]; }

 private:
  void begin(const std::function<void(int)>& body) {
    active = this;
    writes_ = 0;
    current_ = -1;
    for (int r = 0; r < ranks_; ++r) start(r, body);
    for (int r = 0; r < ranks_; ++r) resume(r);  // to their first access
  }
  void step(int chosen, int victim, int dies_at) {
    Fiber& fiber = fibers_[chosen];
    fiber.die = fiber.die || (victim >= 0 && chosen == victim && fiber.steps == dies_at);
    ++fiber.steps;
    resume(chosen);
  }
  void end() {
    for (int r = 0; r < ranks_; ++r) finished_[r] = fibers_[r].finished;
    for (int r = 0; r < ranks_; ++r) {
      fibers_[r].die = true;  // unwinds its stack
      if (!fibers_[r].finished) resume(r);
    }
    active = nullptr;
  }
  bool is_enabled(int r) const {
    const Fiber& fiber = fibers_[r];
    return !fiber.finished && (!fiber.idle || writes_ > fiber.seen_writes);
  }
  void start(int r, const std::function<void(int)>& body) {
    Fiber& fiber = fibers_[r];
    fiber.finished = fiber.die = fiber.idle = false;
    fiber.steps = 0;
    fiber.next = {};
    fiber.body = [body, r] { body(r); };
    ::getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &home_;
    ::makecontext(&fiber.context, &Scheduler::entry, 0);
  }
  static void entry() {
    Fiber& fiber = active->fibers_[active->current_];
    try {
      fiber.body();
    } catch (const Died&) {
    }
    fiber.finished = true;
  }
  void resume(int r) {
    current_ = r;
    ::swapcontext(&home_, &fibers_[r].context);
    current_ = -1;
  }
  void pause(Access access) {
    const int me = current_;
    fibers_[me].next = access;
    ::swapcontext(&fibers_[me].context, &home_);
    if (fibers_[me].die) throw Died();
  }

  const int ranks_;
  ucontext_t home_{};
  Fiber fibers_[kMostRanks];
  bool finished_[kMostRanks] = {};
  int current_ = -1;
  uint64_t writes_ = 0;
  std::vector<std::vector<int>> explored_;  // for each depth: choices that have been explored completely
};

}  // namespace

void before_access(const void* word, bool writes) {
  if (Scheduler::active != nullptr) Scheduler::active->before_access(word, writes);
}

namespace {

/// Memory for two groups, made once and cleared before each execution.
class Memory {
 public:
  Memory(int ranks, size_t chunk_bytes, size_t chunks) : ranks_(ranks) {
    geometry_.world_size = ranks;
    geometry_.eager_bytes = 4096;
    geometry_.chunk_bytes = chunk_bytes;
    geometry_.chunks = chunks;
    geometry_.channel_bytes = 64;
    geometry_.resident_bytes = 1 << 16;
    for (int r = 0; r < ranks_; ++r)
      segments_.push_back(
          std::make_shared<SharedSegment>("explorer", geometry_.segment_bytes(), geometry_.resident_at()));
  }
  std::unique_ptr<Group> fresh_group(int rank) {
    std::vector<PeerWatch> watches(static_cast<size_t>(ranks_));
    return std::make_unique<Group>(World(rank, geometry_, segments_, std::move(watches), true),
                                   std::make_shared<ProgressSet>(),
                                   Limits{.one_shot = kOneShot, .private_one_shot = kOneShot, .eager = kOneShot});
  }
  void wipe() {
    const std::byte nonce[16] = {};
    for (int r = 0; r < ranks_; ++r) {
      std::memset(segments_[static_cast<size_t>(r)]->data(), 0xee, geometry_.resident_at());
      World::initialize(*segments_[static_cast<size_t>(r)], r, ranks_, nonce);
    }
  }

 private:
  const int ranks_;
  Geometry geometry_;
  std::vector<std::shared_ptr<SharedSegment>> segments_;
};

enum class Kind {
  kInlineReduce,
  kEagerReduce,
  kInPlace,
  kBroadcast,
  kBarrier,
  kMessage,
  kTwoRounds,  ///< all_reduce
  kThreeRounds,
  kBroadcastInRounds,
  kAllToAllInRounds,
  kNothing
};

constexpr size_t kChunk = 640;

/// One rank's buffers and what it expects of two operations.
struct RankState {
  std::unique_ptr<Group> group;
  std::vector<int32_t> values[2];
  std::vector<int32_t> output[2];  ///< where it is not the input
  int32_t* data[2] = {};
  WorkPtr work[2];
};

size_t elements(Kind kind) {
  switch (kind) {
    case Kind::kEagerReduce:
      return kInlineBytes / 4 + 1;
    case Kind::kInPlace:
      return kOneShot / 4 + 1;
    case Kind::kTwoRounds:
      return 2 * kChunk / 4;
    case Kind::kThreeRounds:
    case Kind::kBroadcastInRounds:
      return 3 * kChunk / 4 - 7;
    case Kind::kAllToAllInRounds:
      return kChunk / 4 + 1;
    case Kind::kNothing:
      return 0;
    default:
      return 2;
  }
}

class Scenario {
 public:
  Scenario(int ranks, Kind first, Kind second, int warm_up, size_t chunks = 2)
      : ranks_(ranks), kinds_{first, second}, warm_up_(warm_up), memory_(ranks, kChunk, chunks) {}

  int ranks() const { return ranks_; }

  void prepare() {
    memory_.wipe();
    for (int r = 0; r < ranks_; ++r) {
      RankState& state = states_[r];
      state.group = memory_.fresh_group(r);
      for (int i = 0; i < 2; ++i) {
        state.values[i].resize(buffer_elements(i));
        for (size_t k = 0; k < buffer_elements(i); ++k) state.values[i][k] = given(r, i, k);
        state.output[i].assign(buffer_elements(i), -1);
        state.data[i] = state.values[i].data();
        state.work[i] = nullptr;
        if (kinds_[i] != Kind::kInPlace) continue;
        state.data[i] = reinterpret_cast<int32_t*>(state.group->allocate(state.values[i].size() * 4));
        std::copy(state.values[i].begin(), state.values[i].end(), state.data[i]);
      }
    }
    // Uses up lines, so that the operations under test reuse them.
    for (int i = 0; i < warm_up_; ++i) {
      for (int r = 0; r < ranks_; ++r) states_[r].group->start({.kind = OperationKind::kBarrier});
      for (int r = 0; r < ranks_; ++r) states_[r].group->progress();
    }
  }

  void body(int rank) {
    RankState& state = states_[rank];
    for (int i = 0; i < 2; ++i)
      if (takes_part(i)) state.work[i] = start(rank, i);
    const auto done = [&](int i) { return !takes_part(i) || state.work[i]->done(); };
    for (;;) {
      const uint64_t since = Scheduler::active->writes();
      if (done(0) && done(1)) return;
      state.group->progress();
      if (done(0) && done(1)) return;
      Scheduler::active->idle(since);
    }
  }

  /// Empty if everything that was done is right, and what was not done is rightly blamed on the dead rank.
  std::string verdict(const Scheduler& scheduler, int victim) {
    for (int r = 0; r < ranks_; ++r) {
      if (r == victim) continue;
      for (int i = 0; i < 2; ++i) {
        if (!takes_part(i)) continue;
        const auto& work = states_[r].work[i];
        if (work && work->failed()) return "failed: " + work->error();
        if (!work || !work->done()) {
          if (victim < 0) return "rank " + std::to_string(r) + " is stuck in operation " + std::to_string(i);
          if (!waits_for(r, victim)) return "stuck, and not for the dead";
          continue;
        }
        for (size_t k = 0; k < buffer_elements(i); ++k)
          if (result(r, i)[k] != expected(r, i, k)) return "wrong result of operation " + std::to_string(i);
      }
      if (victim < 0 && !scheduler.finished(r)) return "not finished";
    }
    return "";
  }

  void clear() {
    for (auto& state : states_) state.group.reset();
  }

 private:
  bool takes_part(int i) const { return kinds_[i] != Kind::kNothing; }
  size_t buffer_elements(int i) const {
    return elements(kinds_[i]) * (kinds_[i] == Kind::kAllToAllInRounds ? static_cast<size_t>(ranks_) : 1);
  }
  /// At once, or when the rank finally waits for it.
  bool waits_for(int rank, int victim) const {
    uint64_t seen = 0, next = states_[rank].group->waiting_for();
    while (next != seen) {
      seen = next;
      if ((seen >> victim & 1) != 0) return true;
      for (int r = 0; r < ranks_; ++r)
        if ((seen >> r & 1) != 0) next |= states_[r].group->waiting_for();
    }
    return false;
  }
  const int32_t* result(int rank, int i) const {
    return kinds_[i] == Kind::kAllToAllInRounds ? states_[rank].output[i].data() : states_[rank].data[i];
  }
  /// Differs from element to element, so that a round in the wrong place is noticed.
  static int32_t given(int rank, int i, size_t k) { return 100 * (i + 1) + rank + 1000 * static_cast<int32_t>(k); }
  int32_t expected(int rank, int i, size_t k) const {
    const size_t count = elements(kinds_[i]);
    switch (kinds_[i]) {
      case Kind::kBarrier:
        return given(rank, i, k);
      case Kind::kBroadcast:
      case Kind::kBroadcastInRounds:
        return given(1, i, k);
      case Kind::kMessage:
        return given(0, i, k);
      case Kind::kAllToAllInRounds:
        return given(static_cast<int>(k / count), i, static_cast<size_t>(rank) * count + k % count);
      default:
        int32_t sum = 0;
        for (int r = 0; r < ranks_; ++r) sum += given(r, i, k);
        return sum;
    }
  }
  WorkPtr start(int rank, int i) {
    RankState& state = states_[rank];
    const size_t count = elements(kinds_[i]);
    Request request{.kind = OperationKind::kAllReduce,
                    .type = DataType::kInt32,
                    .count = count,
                    .input = state.data[i],
                    .output = state.data[i]};
    if (kinds_[i] == Kind::kBarrier) return state.group->start({.kind = OperationKind::kBarrier});
    if (kinds_[i] == Kind::kMessage && rank == 0) return state.group->send(state.data[i], count * 4, 1, 7);
    if (kinds_[i] == Kind::kMessage) return state.group->receive(state.data[i], count * 4, 0, 7);
    if (kinds_[i] == Kind::kBroadcast || kinds_[i] == Kind::kBroadcastInRounds)
      request.kind = OperationKind::kBroadcast, request.root = 1;
    if (kinds_[i] == Kind::kAllToAllInRounds)
      request.kind = OperationKind::kAllToAll, request.output = state.output[i].data();
    return state.group->start(request);
  }

  const int ranks_;
  const Kind kinds_[2];
  const int warm_up_;
  Memory memory_;
  RankState states_[kMostRanks];
};

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
                                           std::tuple(Kind::kInPlace, Kind::kInlineReduce, 0),
                                           std::tuple(Kind::kBarrier, Kind::kEagerReduce, 31),
                                           std::tuple(Kind::kInlineReduce, Kind::kMessage, 0)));

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
                                           Draw{3, Kind::kThreeRounds, Kind::kThreeRounds, 31, 2},
                                           Draw{3, Kind::kBroadcastInRounds, Kind::kThreeRounds, 0, 1},
                                           Draw{3, Kind::kAllToAllInRounds, Kind::kBroadcastInRounds, 0, 2},
                                           Draw{3, Kind::kBroadcast, Kind::kAllToAllInRounds, 31, 1}));

}  // namespace
}  // namespace lockstep::shm
