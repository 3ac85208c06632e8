#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "collectives/shm/kernels/stream_copy.h"
#include "collectives/shm/protocol/cells.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// Streams of bytes from this rank to each other one, and from each to this one. A stream consists of blocks, each of
/// which the sender writes to a cell. The sender owns `written`, the receiver `consumed`; their bytes only grow, and
/// may wrap past 2^64. Guarded by the communicator's mutex.
///
/// Many bytes move in pieces, each published at once, so that one rank copies in while the other one copies out. A rank
/// that sleeps is woken only after the last piece that can be moved now.
class ByteStreams {
 public:
  explicit ByteStreams(const World& world);

  /// Commits this rank's cells. REQUIRES: before the first message to it. Throws if memory is short.
  void commit(int to) { cells_[static_cast<size_t>(to)].commit(); }
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
    uint64_t moved = 0;          ///< bytes that this end has written or read
    uint64_t published = 0;      ///< of which the other end may know
    uint64_t others = 0;         ///< bytes that the other end has read or written, as far as this one knows
    uint64_t block = 0;          ///< the number of the block that has the next byte
    size_t at = 0;               ///< its place in the block
    Cells::Cell cell = kNoCell;  ///< of this block; kNoCell at its beginning
    /// Whether the block of so many bytes has ended with these.
    bool move_on(size_t count, size_t bytes) {
      moved += count;
      at += count;
      if (at < bytes) return false;
      ++block;
      at = 0;
      cell = kNoCell;
      return true;
    }
    // Of the sender:
    std::array<Cells::Cell, StreamEnd::kBlocks> begun{};  ///< by block: where it is
    uint64_t announced = 0;                               ///< blocks of which the receiver knows where they are
    uint64_t seen = 0, seen_blocks = 0;                   ///< bytes and blocks for which cells may have come back
  };
  size_t room(int to, size_t wanted);
  size_t available(int from, size_t wanted);
  /// Collects the cells that the receiver has given back.
  void collect(int to, End& end);
  void publish(int to, std::memory_order order);
  /// The place of the next byte, and how many follow it in its cell.
  std::span<std::byte> place_to_write(int to);
  std::span<const std::byte> place_to_read(int from, End& end) const;
  void copy_in(int to, const std::byte* data, size_t bytes, CopyFunction copy);
  void copy_out(int from, std::byte* data, size_t bytes, CopyFunction copy);

  const World& world_;
  const size_t block_;      ///< bytes, as a cell has
  const size_t in_flight_;  ///< the most that is written and not read
  const size_t piece_;
  std::vector<Cells> cells_;  ///< shared with each rank
  std::vector<End> out_;      ///< to each rank
  std::vector<End> in_;       ///< from each rank
};

}  // namespace lockstep::shm
