#include "collectives/groups_board.h"

#include <sstream>

namespace lockstep {

std::optional<WaitRecord> GroupsBoard::read(const std::string& kind, int rank) const {
  if (!store_->check({key(kind, rank)})) return std::nullopt;
  const std::string text = store_->get_to_str(key(kind, rank));
  return text.empty() ? std::nullopt : std::optional(WaitRecord::unpacked(text));
}

void GroupsBoard::say(const std::optional<WaitRecord>& own) const {
  store_->set(key("record", rank_), own ? own->packed() : std::string());
}

WaitRecords GroupsBoard::records(const WaitRecord& own) const {
  WaitRecords records;
  for (int rank = 0; rank < world_size_; ++rank)
    records.push_back(rank == rank_ ? std::optional(own) : read("record", rank));
  return records;
}

void GroupsBoard::leave(const std::string& scope, const WaitRecord& own) const {
  store_->set(key("gone/" + scope, rank_), own.packed());
  store_->set(kPrefix + ("gone/" + scope), std::string("some"));
}

WaitRecords GroupsBoard::departures(const std::string& scope) const {
  if (!store_->check({kPrefix + ("gone/" + scope)})) return {};
  WaitRecords gone;
  for (int rank = 0; rank < world_size_; ++rank) gone.push_back(read("gone/" + scope, rank));
  return gone;
}

void GroupsBoard::tell(const Verdict& verdict) const {
  std::ostringstream text;
  text << verdict.is_deadlock << ' ' << verdict.ranks.size() << ' ';
  for (const int rank : verdict.ranks) text << rank << ' ';
  text << verdict.why;
  for (const int rank : verdict.ranks) store_->set(key("end", rank), text.str());
}

std::optional<GroupsBoard::Verdict> GroupsBoard::told() const {
  if (!store_->check({key("end", rank_)})) return std::nullopt;
  std::istringstream text(store_->get_to_str(key("end", rank_)));
  Verdict verdict;
  size_t count = 0;
  text >> verdict.is_deadlock >> count;
  for (size_t i = 0; i < count && text; ++i) {
    int rank = 0;
    text >> rank;
    if (rank >= 0 && rank < world_size_) verdict.ranks.push_back(rank);
  }
  text.get();
  std::getline(text, verdict.why, '\0');
  return verdict;
}

bool GroupsBoard::have_read(const std::vector<int>& ranks) const {
  std::vector<std::string> keys;
  for (const int rank : ranks) keys.push_back(key("read", rank));
  return store_->check(keys);
}

}  // namespace lockstep
