#include "collectives/shm/protocol/groups_note.h"

#include <algorithm>
#include <cstring>

#include "base/rank_names.h"
#include "collectives/stuck_ranks.h"

// All loads and stores are sequentially consistent, as they are rare: a reader that sees the same even serial number
// before and after has seen one note.

namespace lockstep::shm {
namespace {

constexpr uint64_t kAnyIsEnough = 1 << 8;

void store_text(std::atomic<uint64_t>* words, size_t bytes, const std::string& text) {
  for (size_t at = 0; at < bytes; at += 8) {
    uint64_t word = 0;
    if (at < text.size()) std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    words[at / 8].store(word);
  }
}

std::string load_text(const std::atomic<uint64_t>* words, size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t at = 0; at < bytes; at += 8) {
    const uint64_t word = words[at / 8].load();
    std::memcpy(text.data() + at, &word, 8);
  }
  return text.substr(0, text.find('\0'));
}

uint64_t bit_of(size_t rank) { return uint64_t{1} << rank; }

/// Whether `wait`, of the rank with this bit, needs a call that the other has not made.
bool needs_call(const GroupWait& wait, uint64_t bit, const GroupCalls& theirs) {
  switch (wait.kind) {
    case Waiting::Kind::kNothing:
      return false;
    case Waiting::Kind::kCollective:
      return theirs.started < wait.operation;
    case Waiting::Kind::kSend:
      return (theirs.receives_of & bit) == 0;
    case Waiting::Kind::kReceive:
      return (theirs.sends_to & bit) == 0;
  }
  return false;
}

Needs needs_of(const GroupWaits& waits, size_t rank) {
  const GroupWait& wait = waits[rank];
  Needs needs{.ranks = {}, .any_is_enough = wait.any_is_enough};
  for (size_t other = 0; other < waits.size() && wait.kind != Waiting::Kind::kNothing; ++other) {
    if (other == rank || (wait.needs & bit_of(other)) == 0) continue;
    const auto& calls = waits[other].calls;
    const auto theirs =
        std::find_if(calls.begin(), calls.end(), [&](const GroupCalls& one) { return one.group == wait.group; });
    const bool waits_too = waits[other].kind != Waiting::Kind::kNothing && theirs != calls.end();
    if (waits_too && needs_call(wait, bit_of(rank), *theirs))
      needs.ranks.push_back(static_cast<int>(other));
    else if (wait.any_is_enough)
      return {};  // it computes, and may be the one, or has sent something
  }
  return needs;
}

}  // namespace

std::vector<bool> ranks_stuck_in_groups(const GroupWaits& waits) {
  std::vector<Needs> needs;
  for (size_t rank = 0; rank < waits.size(); ++rank) needs.push_back(needs_of(waits, rank));
  return stuck_ranks(needs);
}

std::string places_of(const GroupWaits& waits, const std::vector<bool>& stuck, size_t most) {
  std::string text;
  std::vector<bool> named(waits.size());
  for (size_t rank = 0; rank < waits.size(); ++rank) {
    if (!stuck[rank] || named[rank]) continue;
    std::vector<bool> here(waits.size());
    for (size_t other = rank; other < waits.size(); ++other)
      here[other] = stuck[other] && waits[other].place == waits[rank].place;
    for (size_t other = rank; other < waits.size(); ++other) named[other] = named[other] || here[other];
    const std::string next = (text.empty() ? "" : "; ") + rank_names(here) + ' ' + waits[rank].place;
    constexpr std::string_view kMore = "; and more";
    if (text.size() + next.size() + kMore.size() > most) return text.append(kMore);
    text += next;
  }
  return text;
}

uint64_t GroupsNote::say(const GroupWait& wait) {
  const uint64_t serial = serial_.load() + 2;
  serial_.store(serial - 1);
  kind_.store(static_cast<uint64_t>(wait.kind) | (wait.any_is_enough ? kAnyIsEnough : 0));
  group_.store(wait.group);
  operation_.store(wait.operation);
  needs_.store(wait.needs);
  count_.store(wait.calls.size());
  for (size_t i = 0; i < wait.calls.size(); ++i) {
    const GroupCalls& calls = wait.calls[i];
    const uint64_t words[] = {calls.group, calls.started, calls.sends_to, calls.receives_of};
    for (size_t word = 0; word < std::size(words); ++word) calls_[i][word].store(words[word]);
  }
  store_text(place_, kPlace, wait.place);
  serial_.store(serial);
  return serial;
}

GroupsNote::Seen GroupsNote::read() const {
  Seen seen{.serial = serial_.load(), .beat = beat_.load(), .wait = {}};
  GroupWait& wait = seen.wait;
  const uint64_t kind = kind_.load(), count = std::min<uint64_t>(count_.load(), kGroups);
  wait.kind = static_cast<Waiting::Kind>(kind & 255);
  wait.any_is_enough = (kind & kAnyIsEnough) != 0;
  wait.group = group_.load();
  wait.operation = operation_.load();
  wait.needs = needs_.load();
  for (uint64_t i = 0; i < count; ++i)
    wait.calls.push_back({calls_[i][0].load(), calls_[i][1].load(), calls_[i][2].load(), calls_[i][3].load()});
  wait.place = load_text(place_, kPlace);
  if (seen.serial % 2 != 0 || serial_.load() != seen.serial) return {};
  return seen;
}

void GroupsNote::tell(const Finding& finding) {
  const uint64_t serial = found_serial_.load() + 2;
  found_serial_.store(serial - 1);
  found_ranks_.store(finding.ranks);
  for (size_t rank = 0; rank < finding.serials.size(); ++rank) {
    found_waits_[rank].store(finding.serials[rank]);
    found_groups_[rank].store(finding.groups[rank]);
  }
  store_text(found_text_, kText, finding.text);
  found_serial_.store(serial);
}

std::optional<GroupsNote::Finding> GroupsNote::finding() const {
  const uint64_t serial = found_serial_.load();
  if (serial == 0 || serial % 2 != 0) return std::nullopt;
  Finding finding{.ranks = found_ranks_.load(), .serials = {}, .groups = {}, .text = {}};
  for (size_t rank = 0; rank < finding.serials.size(); ++rank) {
    finding.serials[rank] = found_waits_[rank].load();
    finding.groups[rank] = found_groups_[rank].load();
  }
  finding.text = load_text(found_text_, kText);
  if (found_serial_.load() != serial) return std::nullopt;
  return finding;
}

}  // namespace lockstep::shm
