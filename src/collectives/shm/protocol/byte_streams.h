#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// How far a sender has written into a ring, or its receiver has read. A lap may end before the end of the ring, where
/// the sender turns; a sender is at most one lap ahead.
struct RingPlace {
  static constexpr uint64_t kLaps = uint64_t{1} << 24;  ///< laps are counted modulo this
  static constexpr size_t kLargestRing = (size_t{1} << 20) - 1;

  uint64_t lap = 0;
  size_t turn = 0;  ///< where the lap before ended
  size_t at = 0;

  static RingPlace of(uint64_t word) {
    return {word >> 40, static_cast<size_t>(word >> 20) & kLargestRing, static_cast<size_t>(word) & kLargestRing};
  }
  uint64_t word() const { return lap << 40 | uint64_t{turn} << 20 | uint64_t{at}; }
  void start_lap() {
    lap = (lap + 1) % kLaps;
    turn = at;
    at = 0;
  }
  bool operator==(const RingPlace&) const = default;
};

/// Streams of bytes from this rank to each other one, and from each to this one. Each pair of ranks has a ring in each
/// direction, in the sender's segment. The sender owns `written`, the receiver `consumed`, both a RingPlace. Guarded by
/// the communicator's mutex.
///
/// Many bytes move in pieces, each published at once, so that one rank copies in while the other one copies out. While
/// the receiver keeps up, the sender turns early, so that both find the lines in their first-level caches. A rank that
/// sleeps is woken only after the last piece that can be moved now.
class ByteStreams {
 public:
  explicit ByteStreams(const World& world);

  /// Whether a head of so many bytes can be written now.
  bool has_room(int to, size_t bytes);
  /// Copies a head in, whole, which is published by the next write().
  /// REQUIRES: has_room().
  void begin(int to, const void* head, size_t bytes);
  /// Writes what there is room for, and returns how many bytes these are.
  size_t write(int to, const void* data, size_t bytes);

  /// Whether so many bytes have come. A head comes whole.
  bool has(int from, size_t bytes) { return available(from) >= bytes; }
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
    RingPlace here;       ///< of this end
    RingPlace published;  ///< as the other end may know it
    RingPlace other;      ///< of the other end, as far as this one knows
  };
  /// The longest of a message that has so many bytes left.
  size_t piece_of(size_t bytes) const;
  size_t ahead(const End& end) const;
  size_t room(int to, size_t wanted, bool in_cache);
  size_t available(int from);

  const World& world_;
  const size_t capacity_;
  const size_t piece_;
  const size_t early_turn_;  ///< the place from which on a sender whose receiver keeps up turns
  std::vector<End> out_;     ///< to each rank
  std::vector<End> in_;      ///< from each rank
};

}  // namespace lockstep::shm
