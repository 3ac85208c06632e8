#pragma once

#include <cstdint>

#include "collectives/shm/protocol/operation.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// What the rounds of a group have used; the same on every rank when an operation begins.
struct ChunkArea {
  uint64_t rounds = 0;     ///< of all operations
  size_t at = 0;           ///< where the last chunk ends
  uint64_t exchanges = 0;  ///< turns of operations that exchange chunks
};

/// Where the chunks of an operation are in the area.
struct ChunkSlots {
  size_t stride;           ///< bytes of each
  uint64_t count;          ///< so many are used, in turn
  uint64_t first = 0;      ///< the one of the first round
  bool in_area = false;    ///< else where the chunks of an all_reduce are
  bool exchanged = false;  ///< a rank writes where it has read in the turn before: in its own memory or in the other's

  uint64_t turn(uint64_t round) const { return round / count; }
  size_t at(uint64_t round) const { return (first + round) % count * stride; }
};

/// Moves a large operation in rounds through the ranks' chunks, whose memory is bounded and stays in the cache.
///
///   fill    a rank writes round k of its package into its chunk k mod chunks     -> word `filled`
///   reduce  (all_reduce only) it sums its slice of round k over its own input
///           and the others' chunks, into its output and those chunks             -> word `reduced`
///   drain   it takes round k from the others' chunks, or the sums from its own   -> word `drained`
///
/// A chunk is filled again when all its readers have drained it: of an all_reduce only its owner, once all have
/// reduced. The three stages overlap: step() does whatever can be done and never waits. A rank whose package is in
/// resident memory fills nothing: the others read it in place, and its operation ends when they have drained it.
class Rounds {
 public:
  /// `area`: where the rounds of the operations before have left it.
  Rounds(const World& world, const Operation& operation, const ChunkArea& area);

  /// The rounds that the operation takes on the rank where it takes most; the same number on every rank.
  uint64_t count() const { return rounds_for(longest_block()); }
  /// The area after this operation; the same on every rank.
  ChunkArea area_after() const;

  /// Does what can be done now. Returns true when the operation is over for this rank; else adds to `blocked_on` the
  /// ranks it waits for.
  bool step(uint64_t& blocked_on);

  /// Grows whenever step() has moved something.
  uint64_t moved() const { return filled_ + reduced_ + drained_; }

 private:
  Range range(uint64_t round) const;
  Range slice(int rank, Range range) const;
  /// Rounds needed to move `bytes` of a block.
  uint64_t rounds_for(size_t bytes) const;
  /// The longest from any rank to any rank; the same on every rank.
  size_t longest_block() const;
  /// The value of a word when `rounds` of this operation are done.
  uint64_t key(uint64_t rounds) const { return area_.rounds + rounds; }

  bool may_fill(uint64_t round, uint64_t& blocked_on) const;
  bool may_reduce(uint64_t round, uint64_t& blocked_on) const;
  bool may_drain(uint64_t round, uint64_t& blocked_on) const;
  bool all_reached(Word Control::*word, uint64_t ranks, uint64_t value, uint64_t& blocked_on) const;
  void fill(uint64_t round);
  void reduce(uint64_t round);
  void drain(uint64_t round);
  std::byte* chunk(int rank, uint64_t round) const;
  /// Where that rank's block is in a chunk.
  size_t block_at(int rank) const;
  const std::byte* source(int rank, uint64_t round) const;
  void drain_sums(uint64_t round, Range whole);
  void publish(Word& word, uint64_t rounds);

  const World& world_;
  const Operation& operation_;
  const ChunkArea area_;  ///< before this operation
  const bool in_slices_;  ///< all_reduce
  const bool direct_;     ///< the others read this rank's package in place
  size_t round_bytes_;    ///< of every block
  ChunkSlots slots_;
  uint64_t readers_ = 0;  ///< ranks that read this rank's package, as bits

  uint64_t fills_;  ///< rounds this rank fills, reduces and drains in all
  uint64_t reductions_;
  uint64_t drains_;
  uint64_t filled_ = 0;  ///< rounds done
  uint64_t reduced_ = 0;
  uint64_t drained_ = 0;
};

}  // namespace lockstep::shm
