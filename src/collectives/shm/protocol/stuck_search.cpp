#include "collectives/shm/protocol/stuck_search.h"

#include <algorithm>

#include "base/thread_token.h"
#include "collectives/shm/protocol/channels.h"
#include "collectives/shm/protocol/verdict.h"
#include "collectives/stuck_ranks.h"

namespace lockstep::shm {
namespace {

/// How long this rank must have waited before it looks, and how long it must then see the others in the same waits.
constexpr std::chrono::milliseconds kPatience{1500}, kSameFor{500};

/// Whose calls `rank` needs.
Needs needs_of(int rank, const std::vector<Waiting>& all) {
  const Waiting& waiting = all[static_cast<size_t>(rank)];
  const uint64_t own_bit = uint64_t{1} << rank;
  Needs needs;
  for (int other = 0; other < static_cast<int>(all.size()); ++other) {
    if (other == rank) continue;
    const Waiting& theirs = all[static_cast<size_t>(other)];
    switch (waiting.kind) {
      case Waiting::Kind::kNothing:
        break;
      case Waiting::Kind::kCollective:
        if (theirs.started < waiting.operation) needs.ranks.push_back(other);
        break;
      case Waiting::Kind::kSend:
        if (other == waiting.peer && (theirs.receives_of & own_bit) == 0) needs.ranks.push_back(other);
        break;
      case Waiting::Kind::kReceive:
        if (waiting.peer != kAnySource && waiting.peer != other) break;
        if ((theirs.sends_to & own_bit) != 0) return {};  // it moves
        needs.ranks.push_back(other);
        needs.any_is_enough = waiting.peer == kAnySource;
        break;
    }
  }
  return needs;
}

}  // namespace

Waiting::Words Waiting::pack() const {
  return {static_cast<uint64_t>(kind) | static_cast<uint64_t>(has_other) << 8 | static_cast<uint64_t>(peer + 1) << 16,
          static_cast<uint64_t>(tag),
          operation,
          started,
          sends_to,
          receives_of,
          static_cast<uint64_t>(other_tag)};
}

Waiting Waiting::unpack(const Words& words) {
  return {.kind = static_cast<Kind>(words[0] & 255),
          .peer = static_cast<int>(words[0] >> 16) - 1,
          .tag = static_cast<int64_t>(words[1]),
          .operation = words[2],
          .started = words[3],
          .sends_to = words[4],
          .receives_of = words[5],
          .has_other = (words[0] >> 8 & 1) != 0,
          .other_tag = static_cast<int64_t>(words[6])};
}

void StuckSearch::note_caller() {
  const void* const here = thread_token();
  if (caller_ == nullptr) caller_ = here;
  if (caller_ == here) return;
  several_callers_ = true;
  if (is_published()) withdraw();
}

void StuckSearch::write(const Waiting& now) {
  WaitNote& note = world_.mine().waiting;
  const Waiting::Words words = now.pack();
  // Sequentially consistent, as it is rare: a reader that sees the same even serial before and after has seen one note.
  note.serial.store(++serial_ * 2 - 1);
  for (size_t i = 0; i < words.size(); ++i) note.words[i].store(words[i]);
  note.serial.store(serial_ * 2);
  own_ = now;
}

void StuckSearch::publish(const Waiting& now) {
  if (now == own_) return;
  since_ = Clock::now();
  stuck_.clear();
  write(now);
}

StuckSearch::Seen StuckSearch::read(int rank) const {
  const WaitNote& note = world_.control(rank).waiting;
  const uint64_t serial = note.serial.load();
  Waiting::Words words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = note.words[i].load();
  if (serial % 2 != 0 || note.serial.load() != serial) return {};
  return {serial, Waiting::unpack(words)};
}

bool StuckSearch::finds_ranks() {
  const auto now = Clock::now();
  if (now - since_ < kPatience) return false;
  std::vector<Seen> seen;
  std::vector<Waiting> waits;
  for (int rank = 0; rank < world_.size(); ++rank) {
    seen.push_back(read(rank));
    waits.push_back(seen.back().waiting);
  }
  std::vector<Needs> needs;
  for (int rank = 0; rank < world_.size(); ++rank) needs.push_back(needs_of(rank, waits));
  const std::vector<bool> stuck = stuck_ranks(needs);
  const auto is_message = [](const Waiting& waiting) { return waiting.kind > Waiting::Kind::kCollective; };
  bool any_message = false;
  for (size_t rank = 0; rank < seen.size(); ++rank) {
    if (!stuck[rank]) seen[rank] = {};
    any_message = any_message || is_message(seen[rank].waiting);
  }
  if (!stuck[static_cast<size_t>(world_.rank())] || !any_message) {
    stuck_.clear();
    return false;
  }
  const auto same_serial = [](const Seen& a, const Seen& b) { return a.serial == b.serial; };
  if (!std::equal(seen.begin(), seen.end(), stuck_.begin(), stuck_.end(), same_serial)) {
    stuck_ = std::move(seen);
    stuck_since_ = now;
    culprit_ = needs[static_cast<size_t>(world_.rank())].ranks.front();
    return false;
  }
  return now - stuck_since_ >= kSameFor;
}

std::string StuckSearch::text_of(int rank, const Waiting& waiting) const {
  const auto name = [&](int of) { return "rank " + std::to_string(world_.numbers().name_of(of)); };
  const std::string waits = name(rank) + " waits ", with_tag = " with tag " + std::to_string(waiting.tag);
  switch (waiting.kind) {
    case Waiting::Kind::kNothing:
      return "";
    case Waiting::Kind::kCollective:
      return waits + "in " + announced(world_, rank, waiting.operation);
    case Waiting::Kind::kSend:
      return waits + "until " + name(waiting.peer) + " receives its message" + with_tag;
    case Waiting::Kind::kReceive:
      return waits + "for a message from " + (waiting.peer == kAnySource ? "any rank" : name(waiting.peer)) + with_tag +
             (waiting.has_other ? " and has one with tag " + std::to_string(waiting.other_tag) : "");
  }
  return "";
}

std::string StuckSearch::text() const {
  std::string text;
  for (size_t rank = 0; rank < stuck_.size(); ++rank)
    if (stuck_[rank].serial != 0)
      text += (text.empty() ? "" : "; ") + text_of(static_cast<int>(rank), stuck_[rank].waiting);
  return text;
}

}  // namespace lockstep::shm
