#include "launch/conclusion.h"

#include <signal.h>

#include <algorithm>

#include "launch/launch_error.h"

// How a run, or a start of it, is judged: once, from all evidence. Who acted on less would restart what cannot start,
// or blame a rank that the kernel has killed for memory.

namespace lockstep {
namespace {

using Phase = RunState::Phase;

/// From a program that was asked to leave, these codes are no failure.
bool is_leaving(const ProcessEnd& how) {
  return how.kind == ProcessEnd::Kind::kExited && (how.value == kExitPreempted || how.value == kExitPreemptedUnsaved);
}

/// The exit code of a run that was asked to end before any rank had failed.
int exit_code_of_stop(const RunState& state, const std::vector<RankView>& ranks, bool all_well) {
  if (state.stop_signal != 0 && !asks_to_leave(state.stop_signal)) return 128 + state.stop_signal;
  const bool left = std::any_of(state.ends.begin(), state.ends.end(), [](const RankEnd& end) {
    return end.how.kind == ProcessEnd::Kind::kExited && end.how.value == kExitPreempted;
  });
  const bool saved = left || (state.asked_at && has_saved_since(ranks, *state.asked_at));
  if (saved && !state.asked_twice) return kExitPreempted;
  // It was ending anyway.
  const Phase phase = state.ended_as.value_or(state.phase);
  const bool unmoved = phase == Phase::kRunning || phase == Phase::kLeaving;
  if (all_well && unmoved && !state.told) return kExitOk;
  return kExitPreemptedUnsaved;
}

/// What the ranks did, by the order of their ends, their pages and what this launcher did to them.
Verdict judge_run(const RunState& state, const std::vector<RankView>& ranks) {
  std::vector<RankStatus> accounts;
  for (const auto& rank : ranks) accounts.push_back(rank.account);
  if (state.hang) {
    const RankEnd* end = find_end(state.ends, state.hang->culprit);
    return {.exit_code = kExitHang,
            .culprit = end != nullptr ? *end : RankEnd{.rank = state.hang->culprit, .ended = false},
            .testimony = state.hang->what};
  }
  if (state.missing)
    return {.exit_code = kExitNotStarted,
            .culprit = *find_end(state.ends, state.missing->rank),
            .witness = state.missing->witness,
            .testimony = "it waits for all ranks to join"};
  const bool asked = state.stop_signal != 0 || state.asked_at;
  std::vector<RankEnd> ends = state.ends;
  if (asked)
    for (RankEnd& end : ends)
      if (is_leaving(end.how)) end.how.value = 0;
  const auto first = std::find_if(ends.begin(), ends.end(), [](const RankEnd& end) { return end.how.failed(); });
  const bool failed = first != ends.end();
  // Ranks that fail after they were told to stop fail because of that.
  if (!asked || (failed && !first->stopped)) return judge(ends, accounts);
  return {.exit_code = exit_code_of_stop(state, ranks, !failed)};
}

/// What neither pages nor ends tell: that the kernel killed for memory, and that a library was missing.
void weigh_evidence(Verdict& verdict, const RankView& culprit) {
  if (!verdict.culprit->ended || verdict.culprit->stopped) return;
  const ProcessEnd& how = verdict.culprit->how;
  const bool sigkill = how.kind == ProcessEnd::Kind::kSignalled && how.value == SIGKILL;
  if (verdict.exit_code == kExitRankKilled && sigkill && culprit.memory.count > 0)
    verdict.exit_code = kExitOutOfMemory;
  const bool by_loader = how == ProcessEnd{ProcessEnd::Kind::kExited, 127} && culprit.library_missing;
  if (verdict.exit_code == kExitRankFailed && by_loader) verdict.exit_code = kExitNotStarted;
}

}  // namespace

bool has_saved_since(const std::vector<RankView>& ranks, Clock::time_point since) {
  return std::any_of(ranks.begin(), ranks.end(), [&](const RankView& rank) {
    return !rank.account.checkpoint.empty() && rank.account.checkpoint_time >= since;
  });
}

Verdict conclude(const RunState& state, const std::vector<RankView>& ranks) {
  Verdict verdict = judge_run(state, ranks);
  if (verdict.culprit) weigh_evidence(verdict, ranks[static_cast<size_t>(verdict.culprit->rank)]);
  return verdict;
}

}  // namespace lockstep
