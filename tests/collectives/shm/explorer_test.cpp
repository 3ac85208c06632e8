#include <gtest/gtest.h>
#include <ucontext.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/shm/group.h"

// Every interleaving of two ranks' accesses to shared words, on the real code, with and without a death at each step.
//
// The sources are compiled once more with a word that hands control to this explorer before every access. Ranks are
// fibers of one thread; one execution is a list of choices of who goes on. Executions are enumerated depth first;
// sleep sets leave out those that differ only in the order of accesses to different words or of reads.
// A rank that cannot go on sleeps until another rank has written something: that is what a nap or a spin amounts to.
namespace lockstep::shm {
namespace {

constexpr int kRanks = 2;
constexpr size_t kOneShot = kInlineBytes + 128;  ///< so that data behind, beside and without a copy are all small
struct Died {};

struct Access {
  const void* word = nullptr;  // null: whatever, i.e. looking at everything again
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
  static inline Scheduler* active = nullptr;

  /// False when the execution was given up, because every way on is the same as one seen before.
  bool run(const std::function<void(int)>& body, int victim, int dies_at, std::vector<int>& choices,
           std::vector<std::vector<int>>& rest) {
    bool is_new = true;
    active = this;
    writes_ = 0;
    current_ = -1;
    for (int r = 0; r < kRanks; ++r) start(r, body);
    for (int r = 0; r < kRanks; ++r) resume(r);  // to their first access
    std::vector<int> asleep;
    for (size_t depth = 0;; ++depth) {
      std::vector<int> enabled;
      for (int r = 0; r < kRanks; ++r)
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
      if (chosen == victim && fibers_[chosen].steps == dies_at) fibers_[chosen].die = true;
      ++fibers_[chosen].steps;
      resume(chosen);
    }
    for (int r = 0; r < kRanks; ++r) finished_[r] = fibers_[r].finished;
    for (int r = 0; r < kRanks; ++r) {
      fibers_[r].die = true;  // unwinds its stack
      if (!fibers_[r].finished) resume(r);
    }
    active = nullptr;
    return is_new;
  }

  /// The deepest choice that has another way goes that way.
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

  ucontext_t home_{};
  Fiber fibers_[kRanks];
  bool finished_[kRanks] = {};
  int current_ = -1;
  uint64_t writes_ = 0;
  std::vector<std::vector<int>> explored_;  // for each depth: choices already followed to their end
};

}  // namespace

void before_access(const void* word, bool writes) {
  if (Scheduler::active != nullptr) Scheduler::active->before_access(word, writes);
}

namespace {

/// Two groups' worth of memory, made once and wiped before each execution.
class Memory {
 public:
  Memory() {
    geometry_.world_size = kRanks;
    geometry_.eager_bytes = 4096;
    geometry_.chunk_bytes = 512;
    geometry_.chunks = 2;
    geometry_.channel_bytes = 64;
    geometry_.resident_bytes = 1 << 16;
    for (int r = 0; r < kRanks; ++r)
      segments_.push_back(
          std::make_shared<SharedSegment>("explorer", geometry_.segment_bytes(), geometry_.resident_at()));
  }
  std::unique_ptr<Group> fresh_group(int rank) {
    std::vector<PeerWatch> watches(kRanks);
    return std::make_unique<Group>(World(rank, geometry_, segments_, std::move(watches), true),
                                   std::make_shared<ProgressSet>(),
                                   Limits{.one_shot = kOneShot, .private_one_shot = kOneShot, .eager = kOneShot});
  }
  void wipe() {
    const std::byte nonce[16] = {};
    for (int r = 0; r < kRanks; ++r) {
      std::memset(segments_[static_cast<size_t>(r)]->data(), 0xee, geometry_.resident_at());
      World::initialize(*segments_[static_cast<size_t>(r)], r, kRanks, nonce);
    }
  }

 private:
  Geometry geometry_;
  std::vector<std::shared_ptr<SharedSegment>> segments_;
};

enum class Kind { kInlineReduce, kEagerReduce, kInPlace, kBroadcast, kBarrier, kMessage };

/// One rank's buffers and what it expects of two operations.
struct RankState {
  std::unique_ptr<Group> group;
  std::vector<int32_t> values[2];
  int32_t* data[2] = {};
  CompletionPtr work[2];
};

size_t elements(Kind kind) {
  switch (kind) {
    case Kind::kEagerReduce:
      return kInlineBytes / 4 + 1;
    case Kind::kInPlace:
      return kOneShot / 4 + 1;
    default:
      return 2;
  }
}

class Scenario {
 public:
  Scenario(Kind first, Kind second, int warm_up) : kinds_{first, second}, warm_up_(warm_up) {}

  void prepare() {
    memory_.wipe();
    for (int r = 0; r < kRanks; ++r) {
      RankState& state = states_[r];
      state.group = memory_.fresh_group(r);
      for (int i = 0; i < 2; ++i) {
        state.values[i].assign(elements(kinds_[i]), 100 * (i + 1) + r);
        state.data[i] = state.values[i].data();
        state.work[i] = nullptr;
        if (kinds_[i] != Kind::kInPlace) continue;
        state.data[i] = reinterpret_cast<int32_t*>(state.group->allocate(state.values[i].size() * 4));
        std::copy(state.values[i].begin(), state.values[i].end(), state.data[i]);
      }
    }
    // Uses up lines, so that the operations under test reuse them.
    for (int i = 0; i < warm_up_; ++i) {
      for (auto& state : states_) state.group->start({.kind = OperationKind::kBarrier});
      for (auto& state : states_) state.group->progress();
    }
  }

  void body(int rank) {
    RankState& state = states_[rank];
    for (int i = 0; i < 2; ++i) state.work[i] = start(rank, i);
    for (;;) {
      const uint64_t since = Scheduler::active->writes();
      if (state.work[0]->done() && state.work[1]->done()) return;
      state.group->progress();
      if (state.work[0]->done() && state.work[1]->done()) return;
      Scheduler::active->idle(since);
    }
  }

  /// Empty when all that was done is right, and what was not done is rightly blamed on the dead.
  std::string verdict(const Scheduler& scheduler, int victim) {
    for (int r = 0; r < kRanks; ++r) {
      if (r == victim) continue;
      for (int i = 0; i < 2; ++i) {
        const auto& work = states_[r].work[i];
        if (work && work->failed()) return "failed: " + work->error();
        if (!work || !work->done()) {
          if (victim < 0) return "rank " + std::to_string(r) + " is stuck in operation " + std::to_string(i);
          if (states_[r].group->waiting_for() != uint64_t{1} << victim) return "stuck, and not for the dead";
          continue;
        }
        for (size_t k = 0; k < elements(kinds_[i]); ++k)
          if (states_[r].data[i][k] != expected(r, i)) return "wrong result of operation " + std::to_string(i);
      }
    }
    if (victim < 0 && !(scheduler.finished(0) && scheduler.finished(1))) return "not finished";
    return "";
  }

  void clear() {
    for (auto& state : states_) state.group.reset();
  }

 private:
  int32_t expected(int rank, int i) const {
    const int32_t base = 100 * (i + 1);
    if (kinds_[i] == Kind::kBarrier) return base + rank;
    if (kinds_[i] == Kind::kBroadcast) return base + 1;
    if (kinds_[i] == Kind::kMessage) return base;
    return 2 * base + 1;
  }
  CompletionPtr start(int rank, int i) {
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
    if (kinds_[i] == Kind::kBroadcast) request.kind = OperationKind::kBroadcast, request.root = 1;
    return state.group->start(request);
  }

  const Kind kinds_[2];
  const int warm_up_;
  Memory memory_;
  RankState states_[kRanks];
};

struct Count {
  int executions = 0;
  int longest[kRanks] = {0, 0};
};

/// All interleavings in which `victim` (or nobody: -1) dies at its step `dies_at`.
Count explore(Scenario& scenario, int victim, int dies_at) {
  Scheduler scheduler;
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
    for (int r = 0; r < kRanks; ++r) count.longest[r] = std::max(count.longest[r], scheduler.steps(r));
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
  Scenario scenario(first, second, warm_up);
  const Count alive = explore(scenario, -1, 0);
  int executions = alive.executions;
  for (int victim = 0; victim < kRanks && !HasFailure(); ++victim)
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

}  // namespace
}  // namespace lockstep::shm
