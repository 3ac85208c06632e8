#pragma once

#include <cstdint>
#include <vector>

#include "collectives/shm/protocol/envelope.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// The small messages of one rank. Each pair of ranks has kBoxes boxes in each direction, in the sender's segment, for
/// one message each: a receiver that polls a box fetches the message with the word that tells of it, and the sender
/// stores only one.
///
/// A message that finds no room in its box goes through the pair's byte stream. Both sides number all messages from 1,
/// so that the receiver knows which is next, wherever it is. Guarded by the communicator's mutex.
class MessageBoxes {
 public:
  explicit MessageBoxes(const World& world) : world_(world), peers_(static_cast<size_t>(world.size())) {}

  /// Whether put() of a message of so many bytes would be done.
  bool has_room(int to, size_t bytes);
  /// Puts the next message to that rank into its box. False if the message is too large for it, or the box is in use.
  bool put(int to, const Envelope& envelope, const void* data);
  /// The next message to that rank goes through the stream.
  void pass(int to) { ++peers_[static_cast<size_t>(to)].sent; }

  /// The box that has the next message from that rank; null: none has it yet, or it comes through the stream.
  Box* next(int from) const {
    const uint64_t number = peers_[static_cast<size_t>(from)].received + 1;
    Box& box = world_.box(from, world_.rank(), number);
    return box.word.load(std::memory_order_acquire) == number ? &box : nullptr;  // from put(): what is in it
  }
  static Envelope envelope_of(const Box& box) {
    Envelope envelope;
    envelope.tag = box.tag;
    envelope.bytes_and_type = box.bytes_and_type;
    return envelope;
  }
  /// Copies the data out of next()'s box, which is free then.
  void take(Box& box, int from, void* data);
  /// The next message from that rank has come through the stream.
  void passed(int from);

 private:
  struct Peer {
    uint64_t sent = 0;      ///< messages to it
    uint64_t received = 0;  ///< messages from it
    uint64_t known = 0;     ///< of those sent it has received so many, or more
  };

  const World& world_;
  std::vector<Peer> peers_;
};

}  // namespace lockstep::shm
