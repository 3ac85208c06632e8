#include "launch/stall.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "base/printable.h"
#include "launch/verdict.h"

namespace lockstep {
namespace {

bool is_stopped(const RankView& rank) { return rank.process_state == 'T' || rank.process_state == 't'; }

bool takes_part(const RankView& rank) {
  const auto phase = rank.account.phase;
  return !rank.ended && (phase == RankAccount::Phase::kJoined || phase == RankAccount::Phase::kCommunicates);
}

/// Python programs start collectives that they never wait for; one that waits says for whom.
bool is_awaited(const RankAccount& account) {
  return account.operation.running && (account.phase != RankAccount::Phase::kCommunicates || account.waits_for != 0);
}

bool waits(const RankView& rank) { return takes_part(rank) && is_awaited(rank.account) && !is_stopped(rank); }

std::vector<int> ranks_of(uint64_t bits) {
  std::vector<int> ranks;
  for (; bits != 0; bits &= bits - 1) ranks.push_back(std::countr_zero(bits));
  return ranks;
}

std::string name(int rank) { return "rank " + std::to_string(rank); }

std::string operation_of(const RankView& rank) { return printable(rank.account.operation.text()); }

std::string line_of(int number, const RankView& rank) {
  if (rank.ended) return name(number) + " has ended; its last collective: " + operation_of(rank);
  if (is_stopped(rank)) return name(number) + " is STOPPED (SIGSTOP); its last collective: " + operation_of(rank);
  if (waits(rank)) {
    std::string text = name(number) + " waits in " + operation_of(rank);
    if (rank.account.waits_for != 0) text += " for rank " + list_ranks(ranks_of(rank.account.waits_for));
    return text;
  }
  if (rank.account.phase == RankAccount::Phase::kJoining) return name(number) + " waits for all ranks to join";
  const char* doing = rank.process_state == 'D'   ? " sits in a system call that cannot be interrupted"
                      : rank.process_state == 'R' ? " computes"
                                                  : " is not in a collective";
  return name(number) + doing + "; its last one: " + operation_of(rank);
}

/// A stopped rank, else one that a waiting rank names and that does not wait itself, else any that does not wait.
int missing_rank(const std::vector<RankView>& ranks) {
  uint64_t named = 0;
  for (const auto& rank : ranks)
    if (waits(rank)) named |= rank.account.waits_for;
  int best = -1, best_score = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].ended || waits(ranks[i])) continue;
    const bool is_named = i < 64 && (named >> i & 1) != 0;
    const int score = 1 + (is_named ? 1 : 0) + (is_stopped(ranks[i]) ? 2 : 0);
    if (score > best_score) best = static_cast<int>(i), best_score = score;
  }
  return best;
}

int furthest_behind(const std::vector<RankView>& ranks) {
  int last = -1;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (waits(ranks[i]) &&
        (last < 0 || ranks[i].account.operation.sequence < ranks[static_cast<size_t>(last)].account.operation.sequence))
      last = static_cast<int>(i);
  return last;
}

}  // namespace

std::optional<Stall> diagnose(const std::vector<RankView>& ranks) {
  const auto waiting = std::find_if(ranks.begin(), ranks.end(), waits);
  const bool stopped = std::any_of(ranks.begin(), ranks.end(),
                                   [](const RankView& rank) { return takes_part(rank) && is_stopped(rank); });
  if (waiting == ranks.end() && !stopped) return std::nullopt;
  Stall stall;
  stall.culprit = missing_rank(ranks);
  if (stall.culprit < 0) {
    stall.culprit = furthest_behind(ranks);
    stall.what = "all ranks wait, " + name(stall.culprit) + " in the earliest collective";
  } else if (is_stopped(ranks[static_cast<size_t>(stall.culprit)])) {
    stall.what = name(stall.culprit) + " is STOPPED";
  } else {
    stall.what = name(stall.culprit) + " does not come to " + operation_of(*waiting);
  }
  for (size_t i = 0; i < ranks.size() && stall.lines.size() < Stall::kLines; ++i)
    stall.lines.push_back(line_of(static_cast<int>(i), ranks[i]));
  return stall;
}

std::vector<uint64_t> progress_of(const std::vector<RankView>& ranks) {
  std::vector<uint64_t> beats;
  for (const auto& rank : ranks) beats.push_back(rank.account.beats);
  return std::any_of(ranks.begin(), ranks.end(), takes_part) ? beats : std::vector<uint64_t>();
}

namespace {

/// What /proc/<pid>/stat says behind the name of the program: the state, the parent, the group, ... Empty: nothing.
std::string stat_of(const std::string& pid) {
  std::ifstream file("/proc/" + pid + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  // The name may hold anything.
  const size_t end = text.rfind(')');
  return end == std::string::npos || end + 2 >= text.size() ? std::string() : text.substr(end + 2);
}

}  // namespace

char process_state(pid_t pid) {
  const std::string stat = stat_of(std::to_string(pid));
  return stat.empty() ? '\0' : stat[0];
}

bool group_lives(pid_t group) {
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", ignored)) {
    const std::string name = entry.path().filename();
    if (name.find_first_not_of("0123456789") != std::string::npos) continue;
    char state = 0;
    pid_t parent = 0, its_group = 0;
    if (std::istringstream(stat_of(name)) >> state >> parent >> its_group && its_group == group && state != 'Z' &&
        state != 'X')
      return true;
  }
  return false;
}

}  // namespace lockstep
