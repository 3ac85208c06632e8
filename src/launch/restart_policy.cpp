#include "launch/restart_policy.h"

#include <signal.h>

#include <algorithm>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

constexpr std::chrono::hours kMemory(1);
/// For this many consecutive failures without progress, the restart is immediate.
constexpr int kImmediate = 3;
constexpr std::chrono::milliseconds kFirstPause(250);
constexpr Clock::duration kLongestPause = std::chrono::seconds(60);
constexpr std::chrono::seconds kSilentProgress(10);

/// A signal that asks to leave kills a rank that has not yet joined, because nothing handles it there.
bool came_from_outside(const Failure& failure) {
  const ProcessEnd& how = failure.how;
  return how.kind == ProcessEnd::Kind::kLost ||
         (how.kind == ProcessEnd::Kind::kSignalled && (how.value == SIGKILL || asks_to_leave(how.value)));
}

/// Whether the failure concerns a process or its machine, rather than the behaviour of all ranks.
bool is_of_a_place(const Failure& failure) {
  return failure.rank >= 0 && failure.exit_code >= kExitRankFailed && failure.exit_code <= kExitHang;
}

bool is_same(const Failure& one, const Failure& other) {
  return one.step && one.step == other.step && one.rank == other.rank && one.exit_code == other.exit_code &&
         one.how == other.how && one.text == other.text;
}

/// The number of consecutive failures of this kind, including this one.
int times_in_a_row(const RestartHistory& history, const Failure& failure) {
  const auto& before = history.failures;
  const auto other =
      std::find_if(before.rbegin(), before.rend(), [&](const Failure& one) { return !is_same(one, failure); });
  return 1 + static_cast<int>(other - before.rbegin());
}

/// The number of failures within the hour, including this one.
int within_the_hour(const RestartHistory& history, const Failure& failure) {
  return 1 + static_cast<int>(std::count_if(history.failures.begin(), history.failures.end(),
                                            [&](const Failure& one) { return one.at + kMemory > failure.at; }));
}

bool failed_here_before(const RestartHistory& history, const Failure& failure) {
  return std::any_of(history.failures.begin(), history.failures.end(), [&](const Failure& one) {
    return is_of_a_place(one) && one.rank == failure.rank && one.ranks == failure.ranks &&
           one.at + kMemory > failure.at;
  });
}

/// Steps that are repeated over and over are no progress, either.
Clock::duration pause_after(const RestartHistory& history, const Failure& failure) {
  const int fruitless = failure.progress ? 0 : history.fruitless + 1;
  const int level = std::max(fruitless, times_in_a_row(history, failure)) - kImmediate;
  if (level <= 0) return Clock::duration(0);
  return std::min<Clock::duration>(kFirstPause * (1 << std::min(level - 1, 12)), kLongestPause);
}

/// The reason why no start is allowed; empty: one is.
std::string objection(const RestartLimits& limits, const RestartHistory& history, const Failure& failure) {
  if (history.restarts >= limits.in_total)
    return "all " + std::to_string(limits.in_total) + " restarts that --max-restarts allows were made";
  if (within_the_hour(history, failure) > limits.per_hour)
    return std::to_string(limits.per_hour) +
           " restarts were made within the last hour, as many as --restarts-per-hour " + "allows";
  if (came_from_outside(failure)) return "";
  if (times_in_a_row(history, failure) > 1)
    return "rank " + std::to_string(failure.rank) + " failed twice in step " + std::to_string(*failure.step) +
           " with the same error: this is a bug, which a restart does not repair";
  return "";
}

}  // namespace

bool asks_to_leave(int signal) { return signal == SIGTERM || signal == SIGUSR1; }

bool has_progressed(const Evidence& evidence, Clock::time_point started, Clock::time_point now) {
  bool silent = true;
  for (const auto& rank : evidence.ranks) {
    if (rank.account.steps > 0 || has_saved_since({rank}, started)) return true;
    if (rank.account.phase > RankStatus::Phase::kCommunicates) silent = false;
  }
  return silent && now - started >= kSilentProgress;
}

Failure failure_of(const Verdict& verdict, const Evidence& evidence, Clock::time_point started, Clock::time_point now) {
  Failure failure{.at = now,
                  .ranks = static_cast<int>(evidence.ranks.size()),
                  .exit_code = verdict.exit_code,
                  .progress = has_progressed(evidence, started, now),
                  .lost_ranks = evidence.lost_ranks};
  if (!verdict.culprit) return failure;
  const RankStatus& account = evidence.ranks[static_cast<size_t>(verdict.culprit->rank)].account;
  failure.rank = verdict.culprit->rank;
  failure.how = verdict.culprit->how;
  failure.text = account.failure_text;
  // Only rank 0 knows the checkpoint that all resumed.
  if (account.phase > RankStatus::Phase::kCommunicates)
    failure.step = evidence.ranks[0].account.first_step + account.steps;
  return failure;
}

void RestartHistory::add(const Failure& failure) {
  std::erase_if(failures, [&](const Failure& one) { return one.at + kMemory <= failure.at; });
  failures.push_back(failure);
  ++restarts;
  fruitless = failure.progress ? 0 : fruitless + 1;
}

RestartDecision decide_restart(const RestartLimits& limits, const RestartHistory& history, const Failure& failure) {
  RestartDecision decision{.ranks = failure.ranks, .exit_code = failure.exit_code, .failure = failure};
  if (limits.in_total == 0 || limits.per_hour == 0) return decision;
  decision.why = objection(limits, history, failure);
  if (!decision.why.empty()) return decision;
  const int rest = failure.ranks - failure.lost_ranks;
  if (limits.elastic && failure.lost_ranks > 0 && rest >= limits.elastic->min) {
    decision.ranks = rest;
    decision.why =
        std::string("a machine is gone; ") +
        (failure.lost_ranks == 1 ? "its rank is" : "its " + std::to_string(failure.lost_ranks) + " ranks are") +
        " left out";
  } else if (limits.elastic && is_of_a_place(failure) && failed_here_before(history, failure) &&
             (failure.ranks > limits.elastic->min || !came_from_outside(failure))) {
    const std::string who = "rank " + std::to_string(failure.rank) + " failed twice at its place";
    if (failure.ranks <= limits.elastic->min) {
      decision.exit_code = kExitTooFewRanks;
      decision.why = who + ", and without it fewer than the " + std::to_string(limits.elastic->min) +
                     " ranks that --elastic demands would remain";
      return decision;
    }
    decision.ranks = failure.ranks - 1;
    decision.left_out = failure.rank;
    decision.why = who + "; it is left out";
  } else if (!failure.progress && !came_from_outside(failure)) {
    decision.why = "no step was completed since the last start, so another start would fail in the same way";
    return decision;
  }
  decision.restart = true;
  decision.pause = pause_after(history, failure);
  return decision;
}

}  // namespace lockstep
