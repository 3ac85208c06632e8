#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <random>
#include <vector>

// Ranks as fibers of one thread, which stop before every access to shared memory that the explorers know of; which of
// them goes on is the explorer's choice.
namespace lockstep::shm {

inline constexpr int kMostRanks = 3;
struct Died {};

struct Access {
  const void* word = nullptr;  // null: any word, i.e. checking everything again
  bool writes = false;
};

inline bool conflict(const Access& a, const Access& b) {
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
  std::function<bool()> can_go_on;  ///< null: yes
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
  /// Called by a rank: returns when this holds, which another rank's step brings about.
  void wait_until(std::function<bool()> holds) {
    Fiber& fiber = fibers_[current_];
    fiber.can_go_on = std::move(holds);
    pause({nullptr, false});
    fiber.can_go_on = nullptr;
  }
  /// Wakes ranks that are idle, as a write does.
  void note_write() { ++writes_; }
  /// The rank that runs; -1 between two steps.
  int current() const { return current_; }
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
    if (fiber.finished || (fiber.can_go_on && !fiber.can_go_on())) return false;
    return !fiber.idle || writes_ > fiber.seen_writes;
  }
  void start(int r, const std::function<void(int)>& body) {
    Fiber& fiber = fibers_[r];
    fiber.finished = fiber.die = fiber.idle = false;
    fiber.can_go_on = nullptr;
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

}  // namespace lockstep::shm
