#include "nn/exchange_records.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "nn/layer_error.h"

// A wait never ends if every rank waits, at least one of them in an exchange that another has not begun, and this other
// one has begun a collective that the first has not. Then neither can ever reach the other's operation.

namespace lockstep {
namespace {

std::string line_of(const std::string& text) {
  std::string line = text;
  std::replace(line.begin(), line.end(), '\n', ' ');
  return line;
}

std::string key_of(const char* kind, int rank) {
  return std::string("batch_norm/") + kind + "/" + std::to_string(rank);
}

}  // namespace

std::string ExchangeRecord::packed() const {
  std::ostringstream text;
  text << look.inside << ' ' << look.exchanges << ' ' << look.others << ' ' << look.beats << '\n'
       << line_of(what) << '\n'
       << line_of(place);
  return text.str();
}

ExchangeRecord ExchangeRecord::unpacked(const std::string& packed) {
  ExchangeRecord record{};
  std::istringstream text(packed);
  text >> record.look.inside >> record.look.exchanges >> record.look.others >> record.look.beats;
  text.get();
  std::getline(text, record.what);
  std::getline(text, record.place);
  return record;
}

std::string verdict_on(const SaidByRanks& records) {
  std::vector<ExchangeRecord> all;
  for (const auto& packed : records) {
    if (!packed) return "";
    all.push_back(ExchangeRecord::unpacked(*packed));
  }
  const auto never = [&](const ExchangeRecord& in, const ExchangeRecord& out) {
    return in.look.inside && out.look.exchanges < in.look.exchanges && out.look.others > in.look.others;
  };
  for (const ExchangeRecord& in : all)
    for (const ExchangeRecord& out : all) {
      if (!never(in, out)) continue;
      SaidByRanks places;
      for (const ExchangeRecord& one : all) places.push_back(one.place);
      return layer_error(in.what, "The ranks wait for each other: " + said_by_rank(places)).what();
    }
  return "";
}

ExchangeBoard::ExchangeBoard(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
    : store_(std::move(store)), rank_(rank), world_size_(world_size) {
  for (const char* kind : {kWaits, kFailed, kDecided}) store_->deleteKey(key_of(kind, rank_));
}

SaidByRanks ExchangeBoard::tell(const char* kind, const std::string& mine) const {
  SaidByRanks records(static_cast<size_t>(world_size_));
  store_->set(key_of(kind, rank_), mine);
  for (int rank = 0; rank < world_size_; ++rank) {
    auto& record = records[static_cast<size_t>(rank)];
    if (rank == rank_)
      record = mine;
    else if (store_->check({key_of(kind, rank)}))
      record = store_->get_to_str(key_of(kind, rank));
    if (record && record->empty()) record.reset();
  }
  return records;
}

bool ExchangeBoard::is_decided_elsewhere() const {
  for (int rank = 0; rank < world_size_; ++rank)
    if (rank != rank_ && store_->check({key_of(kDecided, rank)})) return true;
  return false;
}

}  // namespace lockstep
