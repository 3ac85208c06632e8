#include "launch/run_state.h"

#include <signal.h>

#include <algorithm>
#include <cstring>

#include "launch/launch_error.h"
#include "launch/plan.h"
#include "launch/run_text.h"

namespace lockstep {
namespace {

using Phase = RunState::Phase;
using Kind = RunAction::Kind;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kKillTime(10);
/// How long an accused rank may take to end by itself before it is told to: its own end reveals more.
constexpr milliseconds kSettleTime(250);
/// The interval while a rank is gone that another may come to wait for.
constexpr milliseconds kLookForMissingEvery(500);
/// How long before a note, or the end, the states of processes are needed.
constexpr seconds kLookAhead(2);
constexpr seconds kFirstNote(5);
constexpr int kNextNote = 5;  ///< idle times since the previous note
/// After a failed start.
constexpr seconds kLongestPauseOfAgents(1);
/// The grace of ranks that will be started again; a longer one would be useless.
constexpr milliseconds kGraceBeforeRestart(100);

struct StateMachine {
  RunState state;
  Clock::time_point now;
  std::vector<RunAction> actions = {};

  void act(Kind kind, std::string text = "", int signal = 0) { actions.push_back({kind, signal, std::move(text)}); }
  void tell_user(std::string text) { act(Kind::kTellUser, std::move(text)); }

  bool is_done() const { return state.phase == Phase::kGathering || state.phase == Phase::kOver; }
  bool is_up() const { return state.phase == Phase::kRunning || state.phase == Phase::kLeaving; }

  void stop(int signal) {
    state.phase = Phase::kStopping;
    state.evidence.signalled = true;
    state.deadline = now + state.settings.grace;
    act(Kind::kSignal, "", signal);
  }

  void kill() {
    state.phase = Phase::kKilling;
    state.deadline = now + kKillTime;
    std::vector<bool> ended(static_cast<size_t>(state.settings.ranks));
    for (const auto& end : state.evidence.ends) ended[static_cast<size_t>(end.rank)] = true;
    for (int rank = 0; rank < state.settings.ranks; ++rank)
      if (!ended[static_cast<size_t>(rank)]) state.killed.push_back(rank);
    act(Kind::kKill);
  }

  void on(const RankEnded& event);
  void on(const SignalReceived& event);
  void on(const RanksObserved& event);
  void take_in(const RanksObserved& event);
  void watch_progress(const RanksObserved& event);
  void look_for_failure();
  void look_for_missing_rank();
  void consider_resizing(const RanksObserved& event);
  void leave_one_out();
  void ask_to_leave();
  void on(const EvidenceGathered& event);
  void on(const StartFailed& event);
  void follow(const RestartDecision& decision);
  void decide_what_follows();
  void pause(int next_ranks, Clock::duration time);
  void restart();
  RestartDecision decide(const Verdict& verdict) const;
  bool is_ended_by_signal() const {
    return state.evidence.stop_signal != 0 || (state.evidence.asked_at && !state.resize_to);
  }
};

bool asks_for_stops(const std::vector<RankView>& ranks) {
  return std::any_of(ranks.begin(), ranks.end(), [](const RankView& rank) { return rank.account.stop_calls > 0; });
}

void StateMachine::on(const RankEnded& event) {
  RankEnd end = event.end;
  // In kRunning: a signal arrived in this same turn, and the ranks may have got it, too.
  end.stopped = !is_up() || (state.phase == Phase::kRunning && state.evidence.stop_signal != 0);
  state.evidence.ends.push_back(end);
}

void StateMachine::on(const SignalReceived& event) {
  const bool first = state.evidence.stop_signal == 0;
  if (first) state.evidence.stop_signal = event.signal;
  state.resize_to.reset();
  switch (state.phase) {
    case Phase::kRunning:
      // The next look shows whether the ranks can be asked; until then the signal is only recorded.
      if (!asks_to_leave(event.signal)) {
        tell_user(signal_name(event.signal) + ": stopping the ranks");
        stop(event.signal == SIGINT ? SIGINT : SIGTERM);
      }
      return;
    case Phase::kLeaving:
      if (first && asks_to_leave(event.signal)) return;  // the ranks already got it: a scheduler signals all processes
      state.evidence.asked_twice = true;
      tell_user(signal_name(event.signal) + ": stopping the ranks at once");
      return stop(SIGTERM);
    case Phase::kStopping:
      return kill();
    case Phase::kPausing:
      state.phase = Phase::kOver;
      return;
    case Phase::kKilling:
    case Phase::kGathering:
    case Phase::kOver:
      return;
  }
}

void StateMachine::take_in(const RanksObserved& event) {
  state.evidence.ranks = event.ranks;
  state.evidence.lost_ranks = event.lost_ranks;
  for (const auto& rank : event.ranks)
    if (event.stop_at != 0 && rank.account.stop_calls >= event.stop_at) state.evidence.told = true;
  state.program_asks = state.program_asks || asks_for_stops(event.ranks);
}

void StateMachine::on(const RanksObserved& event) {
  const bool late = state.deadline && now >= *state.deadline;
  if (state.phase == Phase::kPausing && late) return restart();
  if (state.phase == Phase::kPausing || is_done()) return;
  take_in(event);
  // A rank that got the signal itself, from a scheduler, asks on behalf of all.
  if (event.stop_asked && !state.evidence.asked_at) {
    state.evidence.asked_at = now;
    if (state.phase == Phase::kRunning) {
      state.phase = Phase::kLeaving;
      leave_one_out();
    }
  }
  if (state.phase == Phase::kRunning && state.evidence.stop_signal != 0 && !state.all_ended()) {
    if (state.program_asks) {
      tell_user(signal_name(state.evidence.stop_signal) +
                ": the ranks are asked to save and leave; a second signal stops them at once");
      ask_to_leave();
    } else {
      tell_user(signal_name(state.evidence.stop_signal) + ": stopping the ranks");
      stop(SIGTERM);
    }
  }
  if (is_up() && !state.all_ended()) {
    consider_resizing(event);
    look_for_failure();
    if (state.phase == Phase::kRunning) look_for_missing_rank();
    if (is_up()) watch_progress(event);
    if (state.phase == Phase::kStopping && decide(judge(state.evidence)).restart)
      state.deadline = now + std::min(state.settings.grace, kGraceBeforeRestart);
  }
  const bool over = state.deadline && now >= *state.deadline;
  if (state.all_ended() || (over && state.phase == Phase::kKilling)) {
    state.deadline.reset();
    state.ended_as = state.phase;
    state.phase = Phase::kGathering;
    act(Kind::kGatherEvidence);
  } else if (state.phase == Phase::kStopping && over) {
    kill();
  }
}

/// Goes by the evidence so far: the verdict may still differ.
void StateMachine::look_for_failure() {
  const Verdict verdict = judge(state.evidence);
  if (!verdict.culprit) return;
  if (!verdict.settled && !state.settle_by) state.settle_by = now + kSettleTime;
  if (!verdict.settled && now < *state.settle_by) return;
  const RankStatus& account = state.evidence.ranks[static_cast<size_t>(verdict.culprit->rank)].account;
  tell_user("rank " + std::to_string(verdict.culprit->rank) + ": " +
            (verdict.culprit->ended ? describe(*verdict.culprit, account) : "others cannot continue without it") +
            "; stopping the other ranks");
  stop(SIGTERM);
}

void StateMachine::look_for_missing_rank() {
  state.may_miss_a_rank = may_miss_a_rank(state.evidence.ends, state.evidence.ranks);
  const auto missing = find_missing_rank(state.evidence.ends, state.evidence.ranks);
  if (!missing) return state.missing_counts_at.reset();
  // A rank may have ended at the instant in which all had met, before the last had recorded that on its page.
  if (!state.missing_counts_at) state.missing_counts_at = now + kSettleTime;
  if (now < *state.missing_counts_at) return;
  state.evidence.missing = missing;
  tell_user("rank " + std::to_string(missing->rank) + ": exit code 0 before it joined, and rank " +
            std::to_string(missing->witness) + " waits for it; stopping the other ranks");
  stop(SIGTERM);
}

void StateMachine::watch_progress(const RanksObserved& event) {
  ProgressMonitor& progress = state.progress;
  if (progress.update(event.ranks, event.processor_times, now)) {
    state.next_note = kFirstNote;
    state.told_slow = false;
    return;
  }
  const bool late = progress.idle >= state.settings.hang_timeout;
  const bool due = progress.idle >= state.next_note || (late && !state.told_slow);
  const bool may_end = state.settings.hang_timeout < kNever;
  const bool hang = (late && progress.is_hang(event.ranks, state.settings.hang_timeout)) ||
                    (may_end && progress.is_cycle(event.ranks));
  if (!due && !hang) return;
  auto stall = diagnose(event.ranks, progress.computing());
  if (!stall) return;
  const std::string found = "no progress for " + in_seconds(progress.idle) + ": " + stall->what;
  if (hang) {
    state.evidence.hang = std::move(*stall);
    tell_user(found + "; stopping the ranks" + list_lines(*state.evidence.hang));
    return stop(SIGTERM);
  }
  if (late && progress.samples < 2) return;  // the next look knows
  if (progress.idle >= state.next_note) state.next_note = progress.idle * kNextNote;
  state.told_slow = late;
  const bool slow = late || stall->kind == Stall::Kind::kComputes;
  tell_user(found + (slow ? "; that is slow, not a hang: " + patience_text(event.ranks) : "") + list_lines(*stall));
}

void StateMachine::ask_to_leave() {
  state.phase = Phase::kLeaving;
  state.evidence.asked_at = now;
  act(Kind::kAskToLeave);
}

/// A rank got its own signal: its place is about to disappear.
void StateMachine::leave_one_out() {
  const int rest = state.settings.ranks - 1;
  if (!state.settings.elastic || rest < state.settings.elastic->min || state.evidence.stop_signal != 0) return;
  state.resize_to = rest;
  tell_user("a signal asks a rank to leave: the ranks save and leave, and the run goes on with " +
            std::to_string(rest));
}

void StateMachine::consider_resizing(const RanksObserved& event) {
  const int wanted = event.resize_to;
  const bool possible =
      state.settings.elastic && state.settings.elastic->contains(wanted) && state.evidence.stop_signal == 0;
  if (!possible) return;
  if (state.phase == Phase::kLeaving && state.resize_to) state.resize_to = wanted;
  if (state.phase != Phase::kRunning || wanted == state.settings.ranks || !asks_for_stops(event.ranks)) return;
  state.resize_to = wanted;
  tell_user("the ranks are asked to save and leave, so that the run can go on with " + std::to_string(wanted));
  ask_to_leave();
}

/// The decision that follows from the failure of these ranks.
RestartDecision StateMachine::decide(const Verdict& verdict) const {
  if (verdict.exit_code == kExitOk || is_ended_by_signal()) return {};
  RestartDecision decision =
      decide_restart(state.settings.limits(), state.history, failure_of(verdict, state.evidence, state.started, now));
  if (decision.restart && state.resize_to) decision.ranks = *state.resize_to;
  return decision;
}

void StateMachine::on(const EvidenceGathered& event) {
  take_in(event.seen);
  state.phase = Phase::kOver;
  state.verdict = judge(state.evidence);
  state.exit_code = state.verdict.exit_code;
  act(Kind::kReport);
  decide_what_follows();
}

void StateMachine::decide_what_follows() {
  const Verdict& verdict = state.verdict;
  // Nothing is started next to a rank that survived even SIGKILL.
  if (verdict.exit_code == kExitOk || is_ended_by_signal() || !state.all_ended()) return;
  if (state.resize_to && !verdict.culprit) {
    if (verdict.exit_code != kExitPreempted)
      return tell_user("the ranks left without saving, so the run does not continue with another number of ranks");
    tell_user("goes on with " + counted_ranks(*state.resize_to));
    if (has_progressed(state.evidence, state.started, now)) state.history.fruitless = 0;
    return pause(*state.resize_to, Clock::duration(0));
  }
  follow(decide(verdict));
}

void StateMachine::on(const StartFailed& event) {
  state.phase = Phase::kOver;
  state.exit_code = event.exit_code;
  if (!event.from_outside || state.evidence.stop_signal != 0) return;
  const RestartDecision decision = decide_restart(state.settings.limits(), state.history,
                                                  {.at = now,
                                                   .ranks = state.settings.ranks,
                                                   .exit_code = event.exit_code,
                                                   .how = {ProcessEnd::Kind::kLost, 0},
                                                   .lost_ranks = event.lost_ranks});
  if (decision.restart) tell_user(event.text);  // otherwise the end reports it
  follow(decision);
  // Machines whose agents exist are not heard of meanwhile.
  if (state.phase == Phase::kPausing) state.deadline = std::min(*state.deadline, now + kLongestPauseOfAgents);
}

void StateMachine::follow(const RestartDecision& decision) {
  if (!decision.restart) {
    state.no_restart = decision.why;
    state.exit_code = decision.exit_code;
    if (!decision.why.empty()) tell_user("no restart: " + decision.why);
    return;
  }
  state.history.add(decision.failure);
  const int limit = state.settings.max_restarts;
  tell_user("restart " + std::to_string(state.history.restarts) +
            (limit == kAnyNumber ? "" : " of " + std::to_string(limit)) +
            (decision.pause > Clock::duration(0) ? " in " + in_seconds(decision.pause) : "") +
            (decision.ranks != decision.failure.ranks ? " with " + counted_ranks(decision.ranks) : "") +
            (decision.why.empty() ? "" : ": " + decision.why));
  state.left_out = decision.left_out;
  pause(decision.ranks, decision.pause);
}

void StateMachine::pause(int next_ranks, Clock::duration time) {
  state.phase = Phase::kPausing;
  state.next_ranks = next_ranks;
  state.deadline = now + time;
}

void StateMachine::restart() {
  RunState fresh = RunState::begin(state.settings, now);
  fresh.restarts = state.restarts + 1;
  fresh.resizes = state.resizes + (state.is_resizing() ? 1 : 0);
  fresh.settings.ranks = state.next_ranks;
  fresh.left_out = state.left_out;
  fresh.history = std::move(state.history);
  fresh.program_asks = state.program_asks;
  state = std::move(fresh);
  act(Kind::kRestart);
}

}  // namespace

RunState RunState::begin(const RunSettings& settings, Clock::time_point now) {
  RunState state;
  state.settings = settings;
  state.started = state.progress.last_look = now;
  state.next_note = kFirstNote;
  return state;
}

std::optional<Clock::time_point> RunState::wake_at() const {
  std::optional<Clock::time_point> at = deadline;
  const auto sooner = [&](Clock::time_point other) { at = at ? std::min(*at, other) : other; };
  if (settle_by && (phase == Phase::kRunning || phase == Phase::kLeaving)) sooner(*settle_by);
  if (phase == Phase::kRunning && missing_counts_at) sooner(*missing_counts_at);
  if (phase == Phase::kRunning || phase == Phase::kLeaving)
    sooner(progress.last_look +
           (may_miss_a_rank ? Clock::duration(kLookForMissingEvery) : ProgressMonitor::kLookEvery));
  return at;
}

bool RunState::wants_process_states() const {
  const Clock::duration first = std::min<Clock::duration>(kFirstNote, settings.hang_timeout);
  return !progress.beats.empty() && progress.idle + kLookAhead >= first;
}

bool RunState::wants_processor_times() const {
  return (phase == Phase::kRunning || phase == Phase::kLeaving) && progress.wants_sample(settings.hang_timeout);
}

Transition next(RunState state, const RunEvent& event, Clock::time_point now) {
  StateMachine mover{std::move(state), now};
  std::visit([&](const auto& what) { mover.on(what); }, event);
  return {std::move(mover.state), std::move(mover.actions)};
}

}  // namespace lockstep
