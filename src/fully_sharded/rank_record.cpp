#include "fully_sharded/rank_record.h"

#include <algorithm>
#include <sstream>

#include "base/rank_names.h"
#include "collectives/stuck_ranks.h"

namespace lockstep::fully_sharded {
namespace {

/// Whether `rank` waits for a call that `other` has not made, and cannot make as long as its record holds.
bool waits_for(const RankRecord& rank, const RankRecord& other) {
  if (other.is_gone && !rank.in_call) return false;  // its program may call the group without the model
  const auto called = other.called.find(rank.group);
  return called != other.called.end() && called->second < rank.collective;
}

}  // namespace

std::string RankRecord::packed() const {
  std::ostringstream text;
  text << is_gone << ' ' << in_call << ' ' << group << ' ' << collective << ' ' << needs << ' ' << called.size() << ' ';
  for (const auto& [id, count] : called) text << id << ' ' << count << ' ';
  text << place;
  return text.str();
}

RankRecord RankRecord::unpacked(const std::string& bytes) {
  RankRecord record;
  std::istringstream text(bytes);
  size_t groups = 0;
  text >> record.is_gone >> record.in_call >> record.group >> record.collective >> record.needs >> groups;
  for (size_t i = 0; i < groups && text; ++i) {
    uint64_t id = 0;
    text >> id;
    text >> record.called[id];
  }
  text.get();
  std::getline(text, record.place, '\0');
  return record;
}

std::vector<bool> ranks_that_never_go_on(const RankRecords& records, const std::vector<uint64_t>& bits) {
  std::vector<Needs> needs(records.size());
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (!records[rank]) continue;
    if (records[rank]->is_gone) {
      needs[rank].ranks.push_back(static_cast<int>(rank));
      continue;
    }
    for (size_t other = 0; other < records.size(); ++other)
      if (other != rank && records[other] && (records[rank]->needs & bits[other]) != 0 &&
          waits_for(*records[rank], *records[other]))
        needs[rank].ranks.push_back(static_cast<int>(other));
  }
  return stuck_ranks(needs);
}

std::string places_of(const RankRecords& records, const std::vector<bool>& of) {
  std::string text;
  std::vector<bool> done(records.size());
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (done[rank] || !of[rank]) continue;
    std::vector<bool> here(records.size());
    for (size_t other = rank; other < records.size(); ++other)
      here[other] = of[other] && records[other]->place == records[rank]->place;
    for (size_t other = rank; other < records.size(); ++other) done[other] = done[other] || here[other];
    text += (text.empty() ? "" : ", ") + rank_names(here) + ' ' + records[rank]->place;
  }
  return text;
}

}  // namespace lockstep::fully_sharded
