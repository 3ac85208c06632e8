#include "collectives/shm/protocol/message_boxes.h"

#include <algorithm>
#include <cstring>

namespace lockstep::shm {

bool MessageBoxes::has_room(int to, size_t bytes) {
  if (bytes > world_.geometry().box_bytes - Box::kHead) return false;
  Peer& peer = peers_[static_cast<size_t>(to)];
  const uint64_t number = peer.sent + 1;
  // From take() and passed(): that rank no longer reads the message that was in this box.
  if (number > peer.known + kBoxes)
    peer.known = world_.control(to).received[world_.rank()].value.load(std::memory_order_acquire);
  return number <= peer.known + kBoxes;
}

bool MessageBoxes::put(int to, const Envelope& envelope, const void* data) {
  if (!has_room(to, envelope.bytes())) return false;
  Peer& peer = peers_[static_cast<size_t>(to)];
  const uint64_t number = peer.sent + 1;
  Box& box = world_.box(world_.rank(), to, number);
  // The line with the word is written last, at one go: the receiver polls it, and takes it away in between.
  const size_t in_line = std::min<size_t>(envelope.bytes(), kCacheLine - Box::kHead);
  const auto* bytes = static_cast<const std::byte*>(data);
  if (envelope.bytes() > in_line) std::memcpy(box.data() + in_line, bytes + in_line, envelope.bytes() - in_line);
  if (in_line > 0) std::memcpy(box.data(), bytes, in_line);
  box.tag = envelope.tag;
  box.bytes_and_type = envelope.bytes_and_type;
  box.received = peer.received;
  peer.sent = number;
  box.word.store(number, std::memory_order_seq_cst);  // releases the box to next(); seq_cst for notify()
  world_.notify();
  return true;
}

void MessageBoxes::take(Box& box, int from, void* data) {
  Peer& peer = peers_[static_cast<size_t>(from)];
  const uint64_t bytes = envelope_of(box).bytes();
  if (bytes > 0) std::memcpy(data, box.data(), bytes);
  // An answer tells that the messages before it have arrived, so that ranks that talk to each other need not ask.
  peer.known = std::max(peer.known, box.received);
  passed(from);
}

void MessageBoxes::passed(int from) {
  const uint64_t received = ++peers_[static_cast<size_t>(from)].received;
  // Releases the reads to put(). Nobody sleeps for it: a message whose box is in use takes the stream.
  world_.mine().received[from].value.store(received, std::memory_order_release);
}

}  // namespace lockstep::shm
