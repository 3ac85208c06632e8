#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace lockstep {

/// The numbers of messages that this rank has sent and received within a group, by peer and tag. Messages of one tag
/// between two ranks are matched in order, so the numbers on both sides tell whether the other has called a message.
/// One thread at a time calls; any thread may read.
class MessageCounts {
 public:
  static constexpr int kTags = 8;  ///< per peer and direction; a message with another tag has no number
  static constexpr int64_t kNoTag = -1;

  struct Entry {
    std::atomic<int64_t> tag{kNoTag};
    std::atomic<uint64_t> calls{0};
    std::atomic<uint64_t> done{0};  ///< whose wait is over
  };
  struct Message {
    bool is_send = false;
    int peer = 0;  ///< of the group
    int tag = 0;
    uint64_t number = 0;     ///< its number among messages of its tag, from 1; 0: not counted
    Entry* entry = nullptr;  ///< of a message that is counted

    void note_done() const {
      if (entry != nullptr) entry->done.fetch_add(1, std::memory_order_relaxed);
    }
  };

  MessageCounts() = default;
  /// Carries nothing over: a group that is being made has no messages.
  MessageCounts(MessageCounts&&) noexcept {}

  Message count(int world_size, bool is_send, int peer, int tag);

  struct Counted {
    bool is_send;
    int peer;
    int64_t tag;  ///< kNoTag: there are others, which are not counted
    uint64_t calls, done;
  };
  void visit(int world_size, const std::function<void(const Counted&)>& visitor) const;

 private:
  struct Direction {
    std::array<Entry, kTags> entries;
    std::atomic<bool> has_others{false};
  };
  struct Peer {
    Direction sends, receives;
  };

  std::unique_ptr<Peer[]> owned_;
  std::atomic<Peer*> peers_{nullptr};  ///< null before the first message
};

}  // namespace lockstep
