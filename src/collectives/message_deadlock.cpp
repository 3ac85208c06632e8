#include "collectives/message_deadlock.h"

#include <utility>

#include "collectives/stuck_ranks.h"

namespace lockstep {
namespace {

/// The ranks without which this rank's wait does not end.
std::vector<int> needs_of(int rank, const std::vector<ToldWait>& notes) {
  const ToldWait& note = notes[static_cast<size_t>(rank)];
  if (note.serial == 0) return {};
  const auto count = [](const std::map<int, uint64_t>& counts, int of) {
    const auto found = counts.find(of);
    return found == counts.end() ? 0 : found->second;
  };
  if (note.message) {
    const int peer = note.message->peer;
    const ToldWait& theirs = notes[static_cast<size_t>(peer)];
    // A message called on both sides, or done on one, makes progress.
    const bool is_ahead = note.message->is_send ? count(theirs.received, rank) > count(note.sent, peer)
                                                : count(theirs.sent, rank) > count(note.received, peer);
    if (is_ahead || theirs.has({!note.message->is_send, rank, note.message->tag})) return {};
    return {peer};
  }
  std::vector<int> needs;
  for (size_t other = 0; other < notes.size(); ++other)
    if (notes[other].serial != 0 && notes[other].called < note.number) needs.push_back(static_cast<int>(other));
  return needs;
}

}  // namespace

std::string MessageDeadlock::judge(const std::vector<ToldWait>& told) {
  std::vector<Needs> needs;
  for (size_t rank = 0; rank < told.size(); ++rank) needs.push_back({needs_of(static_cast<int>(rank), told)});
  const std::vector<bool> stuck = stuck_ranks(needs);
  std::vector<uint64_t> serials;
  std::string text;
  for (size_t rank = 0; rank < told.size(); ++rank) {
    serials.push_back(stuck[rank] ? told[rank].serial : 0);
    if (stuck[rank]) text += (text.empty() ? "" : "; ") + told[rank].says(static_cast<int>(rank));
  }
  const auto now = Clock::now();
  if (serials != stuck_) {
    stuck_ = std::move(serials);
    stuck_since_ = now;
  }
  if (!stuck[static_cast<size_t>(rank_)] || now - stuck_since_ < kSameFor) return "";
  return "ranks wait for each other's messages: " + text + kStuckHint;
}

}  // namespace lockstep
