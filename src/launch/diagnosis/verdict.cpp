#include "launch/diagnosis/verdict.h"

#include <signal.h>

#include <algorithm>

#include "base/text.h"
#include "launch/diagnosis/blame.h"
#include "launch/launch_error.h"
#include "launch/restart_policy.h"

namespace lockstep {
namespace {

using Ground = Blame::Ground;

/// Goes by the way in which the process ended, and other facts about that.
int code_of_end(const RankEnd& end, const RankView& rank) {
  switch (end.how.kind) {
    case ProcessEnd::Kind::kSignalled:
      return end.how.value == SIGKILL && !end.stopped && end.memory.count > 0 ? kExitOutOfMemory : kExitRankKilled;
    case ProcessEnd::Kind::kNotStarted:
      return kExitNotStarted;
    case ProcessEnd::Kind::kLost:
      return kExitMachineLost;
    case ProcessEnd::Kind::kExited:
      break;
  }
  if (end.how.value == 0) return kExitOk;
  const bool by_loader = end.how == kNotFound && !end.stopped && !rank.missing_library.empty();
  return by_loader ? kExitNotStarted : kExitRankFailed;
}

/// For a rank for which others gave up waiting.
int code_of_missing(const RankStatus& account) { return is_before_join(account) ? kExitNotStarted : kExitHang; }

/// For a failure whose kind the rank itself recorded.
std::optional<int> noted_code(const RankStatus& account) {
  switch (account.failure) {
    case RankFailure::kMissing:
      return code_of_missing(account);
    case RankFailure::kDiverged:
      return kExitDiverged;
    case RankFailure::kMismatch:
      return kExitMismatch;
    case RankFailure::kStorage:
      return kExitStorage;
    case RankFailure::kInput:
      return kExitRefusedInput;
    case RankFailure::kLimit:
      return kExitResourceLimit;
    default:
      return std::nullopt;
  }
}

/// The cause of death has precedence, then the error that the rank recorded, then its exit. Empty: it has not failed by
/// itself.
std::optional<int> code_of_own_failure(const RankEnd& end, const RankView& rank) {
  if (end.failed_by_itself() && was_killed(end)) return code_of_end(end, rank);
  if (const auto noted = noted_code(rank.account)) return noted;
  if (end.ended && ended_by_exception(end, rank.account)) return kExitRankFailed;
  if (end.failed_by_itself()) return code_of_end(end, rank);
  return std::nullopt;
}

int code_of_accused(const RankEnd& end, const RankView& rank, RankFailure accusation) {
  const RankStatus& account = rank.account;
  if (accusation == RankFailure::kMismatch) return kExitMismatch;
  if (const auto own = code_of_own_failure(end, rank)) return *own;
  if (is_own(account.failure) || account.phase == RankStatus::Phase::kLeftByException) return kExitRankFailed;
  if (accusation == RankFailure::kMissing) return code_of_missing(account);
  // A rank that ended with 0 or left the group in good order made fewer collectives than the others.
  const bool done = account.phase == RankStatus::Phase::kLeft || (end.ended && !end.how.failed());
  return done ? kExitMismatch : kExitRankFailed;
}

int code_without_culprit(const Evidence& evidence) {
  if (!evidence.was_asked_to_end()) return kExitOk;
  if (evidence.stop_signal != 0 && !asks_to_leave(evidence.stop_signal)) return 128 + evidence.stop_signal;
  const ProcessEnd left{ProcessEnd::Kind::kExited, kExitPreempted}, left_unsaved{left.kind, kExitPreemptedUnsaved};
  const auto ended = [&](auto&& as) { return std::any_of(evidence.ends.begin(), evidence.ends.end(), as); };
  const bool saved = ended([&](const RankEnd& end) { return end.how == left; }) ||
                     (evidence.asked_at && has_saved_since(evidence.ranks, *evidence.asked_at));
  if (saved && !evidence.asked_twice) return kExitPreempted;
  const bool failed =
      ended([&](const RankEnd& end) { return end.how.failed() && end.how != left && end.how != left_unsaved; });
  // It was ending anyway.
  if (!failed && !evidence.signalled && !evidence.told) return kExitOk;
  return kExitPreemptedUnsaved;
}

int code_of(const Blame& blame, const Evidence& evidence) {
  if (blame.ground == Ground::kNothing) return code_without_culprit(evidence);
  const RankEnd& end = *blame.culprit;
  const RankView& rank = evidence.ranks[static_cast<size_t>(end.rank)];
  const RankStatus& speaker = evidence.ranks[static_cast<size_t>(blame.speaker)].account;
  switch (blame.ground) {
    case Ground::kHang:
      return kExitHang;
    case Ground::kAbsence:
      return kExitNotStarted;
    case Ground::kLateness:
      return code_of_missing(speaker);
    case Ground::kAccusation:
      return code_of_accused(end, rank, speaker.failure);
    case Ground::kOwnEnd:
    case Ground::kNothing:
      break;
  }
  if (was_killed(end)) return code_of_end(end, rank);  // killed by the launcher counts, too
  return code_of_own_failure(end, rank).value_or(code_of_end(end, rank));
}

std::string testimony_of(const Blame& blame, int exit_code, const Evidence& evidence) {
  switch (blame.ground) {
    case Ground::kHang:
      return evidence.hang->what;
    case Ground::kAbsence:
      return "it waits for all ranks to join";
    default:
      break;
  }
  const bool says_more = blame.witness || exit_code == kExitHang;
  return says_more ? evidence.ranks[static_cast<size_t>(blame.speaker)].account.failure_text : "";
}

/// Describes why the ranks' calls do not match.
std::string headline_of_mismatch(const Verdict& verdict, const RankStatus& account) {
  const RankEnd& culprit = *verdict.culprit;
  const std::string other = std::to_string(*verdict.witness);
  if (culprit.ended && !culprit.how.failed()) return "ended with exit code 0 while rank " + other + " needed it";
  if (account.phase == RankStatus::Phase::kLeft) return "left the group while rank " + other + " needed it";
  // The witness may have waited in another collective than the one that does not match.
  if (!verdict.opponent) return "makes other calls than the other ranks";
  return "and rank " + std::to_string(*verdict.opponent) + " make different calls";
}

std::string headline_of(const Verdict& verdict, const RankView& rank) {
  const RankEnd& culprit = *verdict.culprit;
  const RankStatus& account = rank.account;
  if (verdict.exit_code == kExitMismatch && verdict.witness) return headline_of_mismatch(verdict, account);
  // No rank has said which rank it waited for.
  if (verdict.exit_code == kExitHang && !verdict.witness && account.failure == RankFailure::kMissing &&
      account.peer != culprit.rank)
    return "waited too long: " + printable_line(verdict.testimony);
  if (verdict.exit_code == kExitHang)
    return "hangs: " + (verdict.witness ? "it did not arrive in time" : printable_line(verdict.testimony));
  if (verdict.exit_code == kExitNotStarted && verdict.witness)
    return culprit.ended && !culprit.how.failed() ? "ended with exit code 0 before it joined the others"
                                                  : "did not join the others";
  if (!culprit.ended) return "failed first: it is still running";
  if (verdict.exit_code == kExitNotStarted && culprit.how == kNotFound && !rank.missing_library.empty())
    return "could not start: the library " + rank.missing_library + " is missing";
  if (!culprit.lost.empty() || ended_by_exception(culprit, account)) return describe(culprit, account);
  return "failed first: " + describe(culprit.how) + (culprit.stopped ? ", after it was asked to stop" : "");
}

}  // namespace

Verdict judge(const Evidence& evidence) {
  Blame blame = find_culprit(evidence);
  Verdict verdict{.exit_code = code_of(blame, evidence)};
  if (!blame.culprit) return verdict;
  verdict.testimony = testimony_of(blame, verdict.exit_code, evidence);
  verdict.culprit = std::move(blame.culprit);
  verdict.also_suspect = std::move(blame.also_suspect);
  verdict.settled = blame.settled;
  verdict.witness = blame.witness;
  verdict.opponent = blame.opponent;
  verdict.headline = headline_of(verdict, evidence.ranks[static_cast<size_t>(verdict.culprit->rank)]);
  return verdict;
}

}  // namespace lockstep
