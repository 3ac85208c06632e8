#include "launch/diagnosis/verdict.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/printable.h"
#include "launch/launch_error.h"

namespace lockstep {
namespace {

/// No other rank can end a rank like this. SIGABRT does not count: an exception that nobody catches ends in it, and
/// that exception may be "connection closed".
bool was_killed(const RankEnd& end) {
  return end.how.kind == ProcessEnd::Kind::kLost ||
         (end.how.kind == ProcessEnd::Kind::kSignalled && end.how.value != SIGABRT);
}

/// The program was found before; what else can be wrong?
const char* start_hint(int error) {
  if (error == ENOEXEC) return " (neither a binary for this machine nor a script with a #! line)";
  if (error == ENOENT) return " (the interpreter it names is missing)";
  return "";
}

/// By the order of the ends alone.
Verdict judge_by_order(const std::vector<RankEnd>& ends, const RankEnd& first) {
  std::vector<RankEnd> together;
  for (const auto& end : ends)
    if (end.how.failed() && end.wake_up == first.wake_up) together.push_back(end);
  if (std::any_of(together.begin(), together.end(), was_killed))
    std::erase_if(together, [](const RankEnd& end) { return !was_killed(end); });
  // A lost machine takes all its ranks along.
  if (together[0].how.kind == ProcessEnd::Kind::kLost) together.resize(1);
  Verdict verdict{.exit_code = exit_code_of(together[0].how), .culprit = together[0]};
  for (size_t i = 1; i < together.size(); ++i) verdict.also_suspect.push_back(together[i].rank);
  std::sort(verdict.also_suspect.begin(), verdict.also_suspect.end());
  return verdict;
}

/// The code for a rank that others gave up waiting for.
int exit_code_of_missing(const RankStatus& account) { return is_before_join(account) ? kExitNotStarted : kExitHang; }

bool is_own(RankFailure failure) {
  return failure == RankFailure::kOwn || failure == RankFailure::kStorage || failure == RankFailure::kInput ||
         failure == RankFailure::kLimit;
}

bool accuses(const RankStatus& account) {
  return account.failure == RankFailure::kPeer || account.failure == RankFailure::kMissing ||
         account.failure == RankFailure::kMismatch;
}

/// The rank that `victim`, which cannot name its peer, may mean: one that failed without accusing anybody, else one
/// that is still running.
std::optional<int> unnamed_culprit(const std::vector<RankEnd>& ends, const std::vector<RankStatus>& accounts,
                                   int victim) {
  std::optional<int> alive;
  for (int rank = 0; rank < static_cast<int>(accounts.size()); ++rank) {
    const RankStatus& account = accounts[static_cast<size_t>(rank)];
    if (rank == victim || accuses(account)) continue;
    const RankEnd* end = find_end(ends, rank);
    if (is_own(account.failure) || (end != nullptr && end->how.failed() && !end->stopped)) return rank;
    if (end == nullptr && !alive) alive = rank;
  }
  return alive;
}

struct Chain {
  int root;     ///< the rank that all accuse in the end
  int witness;  ///< the rank whose page names the root
  bool named;
};

/// Follows the accusations from the rank that failed first. Empty where they lead nowhere.
std::optional<Chain> follow(const std::vector<RankEnd>& ends, const std::vector<RankStatus>& accounts, int first) {
  Chain chain{first, first, true};
  for (size_t links = 0; links <= accounts.size(); ++links) {
    const RankStatus& account = accounts[static_cast<size_t>(chain.root)];
    const RankEnd* end = find_end(ends, chain.root);
    const bool killed = end != nullptr && was_killed(*end) && !end->stopped;
    const bool of_all = account.failure == RankFailure::kMismatch && account.peer < 0;
    if (killed || of_all || !accuses(account) || account.peer == chain.root) return chain;
    int next = account.peer;
    if (next < 0) {
      const auto other = unnamed_culprit(ends, accounts, chain.root);
      if (!other) return std::nullopt;
      next = *other;
      chain.named = false;
    }
    chain.witness = chain.root;
    chain.root = next;
    // Of two ranks whose calls differ, neither is the cause of the other.
    if (account.failure == RankFailure::kMismatch) return chain;
  }
  return std::nullopt;  // a circle
}

/// The code for a culprit that the others accuse.
int exit_code_of(const RankEnd* end, const RankStatus& account, RankFailure accusation) {
  if (accusation == RankFailure::kMismatch) return kExitMismatch;
  const bool killed = end != nullptr && was_killed(*end) && !end->stopped;
  if (const auto known = noted_exit_code(account); known && !killed) return *known;
  if (end != nullptr && ended_by_exception(*end, account)) return kExitRankFailed;
  if (end != nullptr && end->how.failed() && !end->stopped) return exit_code_of(end->how);
  if (is_own(account.failure) || account.phase == RankStatus::Phase::kLeftByException) return kExitRankFailed;
  if (accusation == RankFailure::kMissing) return exit_code_of_missing(account);
  // A rank that ended with 0 or left the group in good order made fewer collectives than the others.
  const bool done = account.phase == RankStatus::Phase::kLeft || (end != nullptr && !end->how.failed());
  return done ? kExitMismatch : kExitRankFailed;
}

/// For ranks that cannot say which rank they miss: the culprit may have lost the others because it came too late.
void blame_for_coming_late(Verdict& verdict, const std::vector<RankStatus>& accounts) {
  if (accounts[static_cast<size_t>(verdict.culprit->rank)].failure != RankFailure::kPeer) return;
  for (size_t rank = 0; rank < accounts.size(); ++rank) {
    if (accounts[rank].failure != RankFailure::kMissing || accounts[rank].peer >= 0) continue;
    verdict.exit_code = exit_code_of_missing(accounts[rank]);
    verdict.witness = static_cast<int>(rank);
    verdict.testimony = accounts[rank].failure_text;
    return;
  }
}

}  // namespace

Verdict judge(const std::vector<RankEnd>& ends, const std::vector<RankStatus>& accounts) {
  const auto first = std::find_if(ends.begin(), ends.end(), [](const RankEnd& end) { return end.how.failed(); });
  if (first == ends.end()) return {.exit_code = kExitOk};
  Verdict by_order = judge_by_order(ends, *first);
  if (accounts.empty() || was_killed(*by_order.culprit)) return by_order;
  const int start = by_order.culprit->rank;
  const auto chain = follow(ends, accounts, start);
  if (!chain || chain->root == start) {
    const RankStatus& account = accounts[static_cast<size_t>(start)];
    Verdict verdict = by_order;
    const int otherwise = ended_by_exception(*verdict.culprit, account) ? kExitRankFailed : verdict.exit_code;
    verdict.exit_code = noted_exit_code(account).value_or(otherwise);
    if (verdict.exit_code == kExitHang) verdict.testimony = account.failure_text;
    if (!chain) blame_for_coming_late(verdict, accounts);
    return verdict;
  }
  const RankStatus& witness = accounts[static_cast<size_t>(chain->witness)];
  const RankEnd* end = find_end(ends, chain->root);
  if (!chain->named && end == nullptr && !is_own(accounts[static_cast<size_t>(chain->root)].failure)) {
    Verdict verdict = by_order;  // the rank that is meant has not shown up yet
    verdict.settled = false;
    if (witness.failure == RankFailure::kMissing) verdict.exit_code = exit_code_of_missing(witness);
    if (verdict.exit_code == kExitHang) verdict.testimony = witness.failure_text;
    return verdict;
  }
  const RankStatus& accused = accounts[static_cast<size_t>(chain->root)];
  std::optional<int> opponent;
  if (witness.failure == RankFailure::kMismatch) opponent = witness.opponent >= 0 ? witness.opponent : chain->witness;
  return {.exit_code = exit_code_of(end, accused, witness.failure),
          .culprit = end != nullptr ? *end : RankEnd{.rank = chain->root, .pid = accused.pid, .ended = false},
          .also_suspect = {},
          .settled = end != nullptr,
          .witness = chain->witness,
          .testimony = witness.failure_text,
          .opponent = opponent};
}

std::optional<int> noted_exit_code(const RankStatus& account) {
  switch (account.failure) {
    case RankFailure::kMissing:
      return exit_code_of_missing(account);
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

int exit_code_of(const ProcessEnd& how) {
  switch (how.kind) {
    case ProcessEnd::Kind::kSignalled:
      return kExitRankKilled;
    case ProcessEnd::Kind::kNotStarted:
      return kExitNotStarted;
    case ProcessEnd::Kind::kLost:
      return kExitMachineLost;
    case ProcessEnd::Kind::kExited:
      break;
  }
  return how.value == 0 ? kExitOk : kExitRankFailed;
}

std::string missing_library(const std::deque<std::string>& tail) {
  constexpr std::string_view kWords = "error while loading shared libraries: ";
  for (const std::string& line : tail)
    if (const size_t at = line.find(kWords); at != std::string::npos) {
      const size_t name = at + kWords.size();
      return printable(line.substr(name, line.find(':', name) - name));
    }
  return "";
}

bool is_before_join(const RankStatus& account) {
  return account.phase == RankStatus::Phase::kUnknown || account.phase == RankStatus::Phase::kJoining;
}

const RankEnd* find_end(const std::vector<RankEnd>& ends, int rank) {
  const auto end = std::find_if(ends.begin(), ends.end(), [&](const RankEnd& e) { return e.rank == rank; });
  return end == ends.end() ? nullptr : &*end;
}

bool ended_by_exception(const RankEnd& end, const RankStatus& account) {
  return account.uncaught && end.how.kind == ProcessEnd::Kind::kSignalled && end.how.value == SIGABRT;
}

std::string describe(const RankEnd& end, const RankStatus& account) {
  if (!end.lost.empty()) return describe(end.how) + ": " + printable(end.lost);
  if (!ended_by_exception(end, account)) return describe(end.how);
  const std::string& text = account.failure_text;
  return "threw: " + (text.empty() ? "an exception without a message" : printable(text.substr(0, text.find('\n'))));
}

std::string describe(const ProcessEnd& how) {
  switch (how.kind) {
    case ProcessEnd::Kind::kExited:
      return "exit code " + std::to_string(how.value);
    case ProcessEnd::Kind::kNotStarted:
      return std::string("could not be started: ") + std::strerror(how.value) + start_hint(how.value);
    case ProcessEnd::Kind::kLost:
      return "was lost with its machine";
    case ProcessEnd::Kind::kSignalled:
      break;
  }
  const char* name = ::sigabbrev_np(how.value);
  const char* text = ::sigdescr_np(how.value);
  if (name == nullptr || text == nullptr) return "killed by signal " + std::to_string(how.value);
  return std::string("killed by SIG") + name + " (" + text + ")";
}

}  // namespace lockstep
