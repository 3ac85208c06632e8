#include "launch/process/team.h"

#include <signal.h>
#include <unistd.h>

namespace lockstep {
namespace {

/// An uncaught exception ends in SIGABRT; any other signal is unrelated to an exception.
bool failed_by_itself(const Rank& rank) {
  return rank.ended && rank.how.failed() && (rank.how.kind == ProcessEnd::Kind::kExited || rank.how.value == SIGABRT);
}

std::string file_of(const std::string& folder, int rank, const char* ending) {
  return folder + "/rank_" + std::to_string(rank) + ending;
}

}  // namespace

std::string Team::error_file(const std::string& folder, int rank) {
  return folder.empty() ? "" : file_of(folder, rank, "_error.json");
}

std::string Team::log_file(const std::string& folder, int rank) { return file_of(folder, rank, ".log"); }

RankStatus Team::account_of(const Rank& rank) const {
  if (!board_) return {};
  const RankStatus account = board_->page(rank.number).read(board_->world_size());
  const bool last_word = failed_by_itself(rank) || account.phase == RankStatus::Phase::kLeftByException;
  return last_word ? account.at_end() : account;
}

RankView Team::view_of(const Rank& rank) const {
  RankView view{.account = account_of(rank), .ended = rank.ended};
  if (rank.ended && rank.how == kNotFound) view.missing_library = missing_library(rank.output.tail().lines());
  return view;
}

std::vector<std::string> Team::losses() const {
  std::vector<std::string> lines;
  for (const auto& rank : ranks_) {
    if (!rank.ended)
      lines.push_back("rank " + std::to_string(rank.number) + ", process " + std::to_string(rank.pid) +
                      ", survives even SIGKILL; it is left behind");
    const RankLog& log = rank.output.log();
    if (log.dropped_lines() > 0)
      lines.push_back(std::to_string(log.dropped_lines()) + " lines of rank " + std::to_string(rank.number) +
                      " could not be written to its log: " + log.drop_reason());
  }
  return lines;
}

void Team::mark_logs(const std::string& mark) const {
  for (const auto& rank : ranks_) {
    if (rank.output.log().path().empty()) continue;
    RankLog log(rank.output.log().path());
    log.add(mark);
  }
}

RunRecord::Contents Team::record() const {
  RunRecord::Contents contents{.launcher = identify(::getpid()), .board_fd = board_ ? board_->fd() : -1};
  for (const auto& rank : ranks_) {
    contents.ranks.push_back(rank.process ? identify(rank.pid) : ProcessIdentity{.pid = rank.pid});
    contents.hosts.push_back(rank.process ? "" : host_of(rank.number));
  }
  return contents;
}

}  // namespace lockstep
