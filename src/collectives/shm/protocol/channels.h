#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "collectives/shm/kernels/element.h"
#include "collectives/shm/protocol/byte_streams.h"
#include "collectives/shm/protocol/envelope.h"
#include "collectives/shm/protocol/message_boxes.h"
#include "collectives/shm/protocol/work.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

inline constexpr int kAnySource = -1;

/// A send or a receive.
class Message : public Work {
 public:
  /// The sender, once a receive is done.
  int source() const { return source_; }

  bool is_send() const { return is_send_; }
  /// The other rank; kAnySource before a receive from any rank is done.
  int peer() const { return is_send_ ? to_ : source_; }
  int64_t tag() const { return tag_; }

  /// Which way a message goes, as a word that is not 0.
  struct Description {
    bool is_send;
    int peer;
    explicit Description(uint64_t word) : is_send(word >> 32 == 2), peer(static_cast<int>(word & 255) - 1) {}
  };
  uint64_t described() const { return uint64_t{is_send_ ? 2u : 1u} << 32 | static_cast<uint64_t>(peer() + 1); }

 private:
  friend class Channels;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
  DataType type_ = DataType::kUInt8;
  int64_t tag_ = 0;
  bool is_send_ = false;
  int to_ = 0;      // of a send
  int source_ = 0;  // wanted, then actual
  size_t moved_ = 0;
  bool announced_ = false;  // send: its envelope is in the channel; receive: matched with one
  std::shared_ptr<void> keep_alive_;
};
using MessagePtr = std::shared_ptr<Message>;

/// The messages of one rank.
///
/// A message is an envelope (tag, type, size) and its bytes. It travels in a box if it is small, and else through the
/// stream of its two ranks. A receive takes the first message with its tag; messages with other tags that come before
/// it are set aside in the receiver's own memory. If type or size is not what the receive wants, the group ends with an
/// error that names both sides.
class Channels {
 public:
  explicit Channels(const World& world);

  MessagePtr send(const void* data, size_t bytes, int to, int64_t tag, std::shared_ptr<void> keep_alive, DataType type);
  MessagePtr receive(void* data, size_t bytes, int from, int64_t tag, std::shared_ptr<void> keep_alive, DataType type);

  /// Sends a message, now. Null: it has gone out whole; else what is to be waited for.
  MessagePtr send_at_once(const void* data, size_t bytes, int to, int64_t tag, DataType type);
  /// No other receive could take a message of that rank, and none was set aside.
  bool may_receive_at_once(int from) const {
    const auto i = static_cast<size_t>(from);
    return receives_.empty() && !incoming_[i].open && set_aside_[i].empty();
  }
  /// Where may_receive_at_once(): something has come from that rank.
  bool has_come(int from) { return boxes_.next(from) != nullptr || streams_.has(from, 1); }
  /// Where may_receive_at_once(): receives the message that has come. Null: it is over; else what is to be waited for.
  MessagePtr receive_at_once(void* data, size_t bytes, int from, int64_t tag, DataType type);

  /// Moves what can be moved. Adds to `blocked_on` the ranks that must act next, and to `blocked_on_any` those of which
  /// any one would do.
  void progress(uint64_t& blocked_on, uint64_t& blocked_on_any);
  /// Grows whenever a part of a message has moved.
  uint64_t advances() const { return advances_; }
  size_t pending() const { return pending_; }
  void fail_all(const std::string& why);

  /// Ranks that have not taken all that was sent to them, and those of which a receive is not done, as bits.
  uint64_t sends_to() const;
  uint64_t receives_of() const;
  /// The tag of a message of that rank that is here, and no receive for it.
  std::optional<int64_t> unwanted_tag(int from) const;
  /// For unreceived(): the message that is on its way, or "tags 5, 6", those of all such messages; empty: there is
  /// none.
  std::string unwanted_tags(int from) const;

 private:
  /// A message on its way in from one rank.
  struct Incoming {
    bool open = false;  // its envelope was read
    Envelope envelope;
    Box* box = nullptr;  // that has it; null: it comes through the stream
    size_t moved = 0;
    MessagePtr receiver;  // null: it is set aside in
    std::vector<std::byte> copy;
  };
  struct SetAside {
    Envelope envelope;
    std::vector<std::byte> data;
  };

  bool push(int to, uint64_t blocked_bit, uint64_t& blocked_on);
  bool pull(int from);
  bool take_in(int from, Incoming& incoming);
  bool open_incoming(int from, Incoming& incoming);
  bool wanted_behind(int from) const;
  bool take_set_aside(Message& message);
  MessagePtr match(int from, int64_t tag);
  void finish_receive(const MessagePtr& message, int from);
  static bool fits(const Message& message, const Envelope& envelope);
  void refuse(const Message& message, int from, const Envelope& envelope);

  const World& world_;
  MessageBoxes boxes_;
  ByteStreams streams_;
  size_t pending_ = 0;
  uint64_t advances_ = 0;
  std::vector<std::deque<MessagePtr>> sends_;   // for each rank
  std::list<MessagePtr> receives_;              // in the order they were started
  std::vector<Incoming> incoming_;              // from each rank
  std::vector<std::list<SetAside>> set_aside_;  // from each rank
};

}  // namespace lockstep::shm
