#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// Streams of bytes from this rank to each other one, and from each to this one. Each pair of ranks has a ring in each
/// direction, in the sender's segment. The sender owns `written`, the receiver `consumed`; both only grow, and may wrap
/// past 2^64. Guarded by the communicator's mutex.
///
/// Many bytes move in pieces, each published at once, so that one rank copies in while the other one copies out. A rank
/// that sleeps is woken only after the last piece that can be moved now.
class ByteStreams {
 public:
  explicit ByteStreams(const World& world);

  /// Commits the ring to that rank. REQUIRES: before the first message to it. Throws if memory is short.
  void commit(int to);
  bool has_room(int to, size_t bytes) { return room(to, bytes) >= bytes; }
  /// Copies a head in, whole, which is published by the next write().
  /// REQUIRES: has_room().
  void begin(int to, const void* head, size_t bytes);
  /// Writes what there is room for, and returns how many bytes these are.
  size_t write(int to, const void* data, size_t bytes);

  /// Whether so many bytes have come.
  bool has(int from, size_t bytes) { return available(from, bytes) >= bytes; }
  /// Copies a head out, whole, and leaves it there.
  /// REQUIRES: has().
  void peek(int from, void* head, size_t bytes) const;
  /// Copies a head out, whole; its room is given back by the next read().
  /// REQUIRES: has().
  void open(int from, void* head, size_t bytes);
  /// Reads what is there, and returns how many bytes these are.
  size_t read(int from, void* data, size_t bytes);

 private:
  /// One direction of one pair, as this end of it sees it.
  struct End {
    uint64_t moved = 0;      ///< bytes that this end has written or read
    uint64_t published = 0;  ///< of which the other end may know
    uint64_t others = 0;     ///< bytes that the other end has read or written, as far as this one knows
    size_t at = 0;           ///< the place in the ring of the next byte
  };
  using CopyFunction = void (*)(std::byte* to, const std::byte* from, size_t bytes);
  size_t room(int to, size_t wanted);
  size_t available(int from, size_t wanted);
  void copy_in(int to, const std::byte* data, size_t bytes, CopyFunction copy);
  void copy_out(int from, std::byte* data, size_t bytes);

  const World& world_;
  const size_t capacity_;
  const size_t in_flight_;  ///< the most that is written and not read
  const size_t piece_;
  uint64_t committed_ = 0;  ///< the rings to these ranks, as bits
  std::vector<End> out_;    ///< to each rank
  std::vector<End> in_;     ///< from each rank
};

}  // namespace lockstep::shm
