#include "collectives/wait_record.h"

#include <algorithm>
#include <sstream>
#include <string_view>

#include "base/rank_names.h"
#include "collectives/message_counts.h"
#include "collectives/stuck_ranks.h"

namespace lockstep {
namespace {

constexpr const char* kAdvice =
    "Every rank must make the same calls of its groups, and of the objects made with them, in the same order";

/// A text of any bytes, preceded by its size.
void write_text(std::ostream& out, const std::string& text) { out << text.size() << ' ' << text << ' '; }
std::string read_text(std::istream& in) {
  size_t size = 0;
  in >> size;
  in.get();
  constexpr size_t kMostBytes = 1 << 20;
  std::string text(std::min(size, kMostBytes), '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  return text;
}

/// Whether `other` has not called the message that `rank` waits for, and none of its calls lets that message arrive.
bool lacks_message(const WaitRecord& rank, uint64_t rank_bit, const WaitRecord& other) {
  const WaitRecord::Message& message = *rank.message;
  WaitRecord::Messages theirs{
      .group = rank.group, .peer = rank_bit, .is_send = !message.is_send, .tag = MessageCounts::kNoTag};
  const bool counts_all = !other.messages.contains(theirs);
  theirs.tag = message.tag;
  const auto counted = other.messages.find(theirs);
  if (counted == other.messages.end() ? !counts_all : counted->second.calls >= rank.number) return false;
  if (!message.is_send || message.needs_receive) return true;
  // A receive of another message may make room for this one.
  return counts_all && std::all_of(other.messages.begin(), other.messages.end(), [&](const auto& one) {
           const auto& [of, count] = one;
           return of.group != rank.group || of.peer != rank_bit || of.is_send || count.calls == count.done;
         });
}

/// Whether `rank` waits for a call that `other` has not made, and cannot make as long as its record holds.
bool waits_for(const WaitRecord& rank, uint64_t rank_bit, const WaitRecord& other) {
  const auto called = other.called.find(rank.group);
  if (called == other.called.end()) return false;
  return rank.message ? lacks_message(rank, rank_bit, other) : called->second < rank.number;
}

/// Ranks that have left the scope of this rank's call; null if none has.
const WaitRecords* gone_from(const Departures& gone, const WaitRecord& rank) {
  const auto found = gone.find(rank.caller.scope);
  return rank.caller.scope.empty() || found == gone.end() ? nullptr : &found->second;
}

bool waits_for_gone(const WaitRecords& records, size_t rank, size_t other, const std::vector<uint64_t>& bits,
                    const Departures& gone) {
  const WaitRecords* const left = gone_from(gone, *records[rank]);
  return left != nullptr && (*left)[other] && waits_for(*records[rank], bits[rank], *(*left)[other]);
}

/// The ranks without whose calls `rank` cannot continue.
Needs needs_of(const WaitRecords& records, size_t rank, const std::vector<uint64_t>& bits, const Departures& gone) {
  Needs needs{.ranks = {}, .any_is_enough = records[rank]->needs_some};
  for (size_t other = 0; other < records.size(); ++other) {
    if (other == rank || (records[rank]->needs & bits[other]) == 0) continue;
    if (waits_for_gone(records, rank, other, bits, gone))
      needs.ranks.push_back(static_cast<int>(rank));  // never, whatever others do
    else if (records[other] && waits_for(*records[rank], bits[rank], *records[other]))
      needs.ranks.push_back(static_cast<int>(other));
    else if (needs.any_is_enough && !records[other])
      return {};  // it computes, and may be the one
  }
  return needs;
}

}  // namespace

std::string WaitRecord::packed() const {
  std::ostringstream text;
  for (const std::string* one : {&place, &caller.of, &caller.advice, &caller.scope}) write_text(text, *one);
  text << serial << ' ' << group << ' ' << number << ' ' << needs << ' ' << needs_some << ' ' << message.has_value()
       << ' ';
  if (message) text << message->is_send << ' ' << message->needs_receive << ' ' << message->tag << ' ';
  text << called.size() << ' ';
  for (const auto& [id, count] : called) text << id << ' ' << count << ' ';
  text << messages.size() << ' ';
  for (const auto& [of, count] : messages)
    text << of.group << ' ' << of.peer << ' ' << of.is_send << ' ' << of.tag << ' ' << count.calls << ' ' << count.done
         << ' ';
  return text.str();
}

WaitRecord WaitRecord::unpacked(const std::string& bytes) {
  WaitRecord record;
  std::istringstream text(bytes);
  for (std::string* one : {&record.place, &record.caller.of, &record.caller.advice, &record.caller.scope})
    *one = read_text(text);
  bool has_message = false;
  text >> record.serial >> record.group >> record.number >> record.needs >> record.needs_some >> has_message;
  if (has_message) {
    Message& message = record.message.emplace();
    text >> message.is_send >> message.needs_receive >> message.tag;
  }
  size_t size = 0;
  text >> size;
  for (size_t i = 0; i < size && text; ++i) {
    uint64_t id = 0;
    text >> id;
    text >> record.called[id];
  }
  size = 0;
  text >> size;
  for (size_t i = 0; i < size && text; ++i) {
    Messages of;
    text >> of.group >> of.peer >> of.is_send >> of.tag;
    Count& count = record.messages[of];
    text >> count.calls >> count.done;
  }
  return record;
}

std::vector<bool> ranks_that_never_go_on(const WaitRecords& records, const std::vector<uint64_t>& bits,
                                         const Departures& gone) {
  std::vector<Needs> needs;
  for (size_t rank = 0; rank < records.size(); ++rank)
    needs.push_back(records[rank] ? needs_of(records, rank, bits, gone) : Needs{});
  return stuck_ranks(needs);
}

namespace {

/// "have destroyed their model".
std::string place_of_several(std::string place) {
  constexpr std::string_view kHas = "has ", kIts = " its ";
  if (!place.starts_with(kHas)) return place;
  place.replace(0, kHas.size(), "have ");
  if (const size_t at = place.find(kIts); at != std::string::npos) place.replace(at, kIts.size(), " their ");
  return place;
}

}  // namespace

std::string places_of(const WaitRecords& records, const std::vector<bool>& of) {
  std::string text;
  std::vector<bool> done(records.size());
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (done[rank] || !of[rank]) continue;
    std::vector<bool> here(records.size());
    for (size_t other = rank; other < records.size(); ++other)
      here[other] = of[other] && records[other]->place == records[rank]->place;
    for (size_t other = rank; other < records.size(); ++other) done[other] = done[other] || here[other];
    const bool is_one = std::count(here.begin(), here.end(), true) == 1;
    text += (text.empty() ? "" : "; ") + rank_names(here) + ' ' +
            (is_one ? records[rank]->place : place_of_several(records[rank]->place));
  }
  return text;
}

std::vector<bool> known_ones(const WaitRecords& records) {
  std::vector<bool> known;
  for (const auto& record : records) known.push_back(record.has_value());
  return known;
}

std::string deadlock_text(const WaitRecords& records, const std::vector<bool>& stuck, const Departures& gone) {
  CallPlace::Caller caller;
  const WaitRecords* left = nullptr;
  for (size_t rank = 0; rank < records.size(); ++rank) {
    if (!stuck[rank]) continue;
    if (caller.of.empty()) caller = records[rank]->caller;
    if (left == nullptr) left = gone_from(gone, *records[rank]);
  }
  std::string text = "the ranks" + (caller.of.empty() ? "" : " of " + caller.of) +
                     " wait for each other, so none can go on: " + places_of(records, stuck);
  if (left != nullptr) text += "; " + places_of(*left, known_ones(*left));
  return text + ". " + (caller.advice.empty() ? kAdvice : caller.advice);
}

}  // namespace lockstep
