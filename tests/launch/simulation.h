#pragma once

#include <gtest/gtest.h>
#include <signal.h>

#include "launch/launch_error.h"
#include "launch/launched.h"
#include "launch/run_state.h"

// Whole runs, event by event, with the test's own clock.

namespace lockstep::simulation {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Kind = RunAction::Kind;
using Phase = RunState::Phase;

inline ProcessEnd exited(int code) { return {ProcessEnd::Kind::kExited, code}; }
inline ProcessEnd killed(int signal) { return {ProcessEnd::Kind::kSignalled, signal}; }

class Simulation {
 public:
  explicit Simulation(RunSettings settings)
      : ranks(static_cast<size_t>(settings.ranks)), state_(RunState::begin(settings, now_)) {}

  /// The kinds of the actions that follow; their texts are kept.
  std::vector<Kind> feed(const RunEvent& event) {
    Transition transition = next(state_, event, now_);
    state_ = std::move(transition.state);
    std::vector<Kind> kinds;
    for (const auto& action : transition.actions) {
      if (action.kind == Kind::kTellUser)
        said += action.text + "\n";
      else if (action.kind != Kind::kReport)
        kinds.push_back(action.kind);
      last_signal = action.kind == Kind::kSignal ? action.signal : last_signal;
    }
    // Nothing lies between the order to gather the evidence and the evidence.
    if (!kinds.empty() && kinds.back() == Kind::kGatherEvidence)
      feed(EvidenceGathered{{.ranks = ranks, .stop_asked = stop_asked, .stop_at = stop_at, .resize_to = resize_to}});
    return kinds;
  }

  std::vector<Kind> look() {
    return feed(RanksObserved{ranks, stop_asked, stop_at, state_.wants_processor_times(), resize_to});
  }
  std::vector<Kind> after(Clock::duration time) {
    now_ += time;
    return look();
  }
  std::vector<Kind> end(int rank, ProcessEnd how) {
    ranks[static_cast<size_t>(rank)].ended = true;
    const RankEnd end{.rank = rank, .pid = 100 + rank, .how = how, .wake_up = ++wake_up_, .memory = memory};
    EXPECT_TRUE(feed(RankEnded{end}).empty());
    return look();
  }
  std::vector<Kind> signal(int number) {
    auto kinds = feed(SignalReceived{number});
    for (const Kind kind : look()) kinds.push_back(kind);
    return kinds;
  }
  /// Looks once a second, as the launcher would, until there is an action or `limit` is over.
  std::vector<Kind> wait(Clock::duration limit) {
    for (const auto until = now_ + limit; now_ < until;) {
      const auto passed = std::min<Clock::duration>(seconds(1), until - now_);
      for (size_t i = 0; i < ranks.size(); ++i) {
        const auto used = std::chrono::duration_cast<Clock::duration>(passed * (i < load.size() ? load[i] : 0));
        ranks[i].processor_time = ranks[i].processor_time.value_or(Clock::duration(0)) + used;
      }
      if (auto kinds = after(passed); !kinds.empty()) return kinds;
    }
    return {};
  }

  const RunState& state() const { return state_; }
  Clock::time_point now() const { return now_; }
  /// By what is known now.
  Verdict judged() const {
    Evidence evidence = state_.evidence;
    evidence.ranks = ranks;
    return judge(evidence);
  }
  int code() const { return judged().exit_code; }

  std::vector<RankView> ranks;
  bool stop_asked = false;
  uint64_t stop_at = 0;
  int resize_to = 0;
  std::vector<double> load;  ///< by rank: processors that it uses; 0 behind the last
  MemoryKills memory;        ///< known of ranks that end from now on
  std::string said;
  int last_signal = 0;

 private:
  Clock::time_point now_{seconds(1000)};
  RunState state_;
  int wake_up_ = 0;
};

using Kinds = std::vector<Kind>;

/// All ranks train: joined, with steps behind them.
inline void train(Simulation& run) {
  for (auto& rank : run.ranks) {
    rank.account.phase = RankStatus::Phase::kJoined;
    rank.account.steps = 3;
    rank.account.beats = 10;
  }
  run.look();
}

inline void wait_in(RankView& rank, uint64_t sequence, uint64_t waits_for) {
  rank.account.operation = {.sequence = sequence,
                            .kind = "all_reduce",
                            .dtype = "Float",
                            .shape = {64, 10},
                            .elements = 640,
                            .running = true};
  rank.account.waits_for = waits_for;
}

}  // namespace lockstep::simulation
