#include "collectives/message_counts.h"

namespace lockstep {

MessageCounts::Message MessageCounts::count(int world_size, bool is_send, int peer, int tag) {
  Message message{.is_send = is_send, .peer = peer, .tag = tag};
  if (owned_ == nullptr) {
    owned_ = std::make_unique<Peer[]>(static_cast<size_t>(world_size));
    peers_.store(owned_.get(), std::memory_order_release);  // to visit()
  }
  Direction& direction = is_send ? owned_[static_cast<size_t>(peer)].sends : owned_[static_cast<size_t>(peer)].receives;
  for (Entry& entry : direction.entries) {
    const int64_t known = entry.tag.load(std::memory_order_relaxed);
    if (known == kNoTag) entry.tag.store(tag, std::memory_order_release);  // to visit(), which begins with it
    if (known != kNoTag && known != tag) continue;
    message.number = entry.calls.load(std::memory_order_relaxed) + 1;
    message.entry = &entry;
    entry.calls.store(message.number, std::memory_order_release);
    return message;
  }
  direction.has_others.store(true, std::memory_order_release);
  return message;
}

void MessageCounts::visit(int world_size, const std::function<void(const Counted&)>& visitor) const {
  const Peer* const peers = peers_.load(std::memory_order_acquire);  // from count()
  if (peers == nullptr) return;
  for (int peer = 0; peer < world_size; ++peer)
    for (const bool is_send : {true, false}) {
      const Direction& direction = is_send ? peers[peer].sends : peers[peer].receives;
      for (const Entry& entry : direction.entries) {
        const int64_t tag = entry.tag.load(std::memory_order_acquire);
        if (tag == kNoTag) break;
        visitor({is_send, peer, tag, entry.calls.load(std::memory_order_acquire),
                 entry.done.load(std::memory_order_acquire)});
      }
      if (direction.has_others.load(std::memory_order_acquire)) visitor({is_send, peer, kNoTag, 0, 0});
    }
}

}  // namespace lockstep
