#pragma once

#include <array>
#include <chrono>
#include <vector>

#include "collectives/hierarchical/halving_plan.h"
#include "collectives/hierarchical/links.h"
#include "collectives/hierarchical/piece_sum.h"
#include "collectives/hierarchical/segment.h"

namespace lockstep::hierarchical_engine {

/// One rank's part in an all_reduce by halving and doubling: its slice, with the ranks of the same number on the other
/// machines. The slice is cut into chunks. A few are under way at once, each a level behind the one before it, so that
/// one is added while another is sent.
///
/// All messages of a chunk are requested when it begins. Two machines exchange at one level only, each a partial sum
/// and a total of every chunk, and begin chunks in the same order. So messages of one tag between two ranks arrive as
/// they were requested.
class Halving {
 public:
  /// The operand's memory: of `count` elements from `begin`.
  struct Slice {
    size_t begin = 0, count = 0;
    int rail = 0;
  };
  struct Tags {
    uint32_t sums, totals;
  };
  /// `travelling` must not be used otherwise until run() returns. `sum` adds by pairs.
  Halving(const Layout& layout, const SumOrder& order, Links& links, const PieceSum& sum, const Segment& segment,
          const Slice& slice, Tags tags, std::chrono::milliseconds timeout);

  /// Returns when the totals are in the memory of all ranks of this machine.
  void run(Scratch& travelling, Scratch& adding);

 private:
  using Move = HalvingPlan::Move;
  struct Chunk {
    Piece piece;                     ///< its elements
    std::byte *own, *received;       ///< partial sums
    std::vector<std::byte*> theirs;  ///< places in `received`: of each level, then of the borrowed one
    std::vector<Transfer> sums;      ///< requested, into these places
    std::vector<Transfer> lent;      ///< requested totals of what was lent
    std::vector<Transfer> totals;    ///< and of each level
    std::vector<Transfer> sent;
    size_t stage = 0;
  };
  void begin(Chunk& chunk, Scratch& adding);
  /// Carries out the next stage of a chunk; returns whether it was the last.
  bool advance(Chunk& chunk);
  void halve(Chunk& chunk, size_t level);
  /// The largest block writes the total; the others lend what they have and wait for it.
  void turn(Chunk& chunk);
  void double_up(Chunk& chunk, size_t level);
  void end(Chunk& chunk);

  /// The first element of a cell, from the chunk's begin.
  size_t at(const Chunk& chunk, size_t cell) const { return chunk.piece.count * cell / plan_.cells; }
  size_t elements(const Chunk& chunk, size_t first, size_t last) const { return at(chunk, last) - at(chunk, first); }
  std::byte* sum_at(std::byte* sums, const Chunk& chunk, size_t cell) const {
    return sums + at(chunk, cell) * sum_.travelling_bytes();
  }
  std::byte* total_at(const Chunk& chunk, size_t cell) const {
    return segment_.place(layout_.local(), chunk.piece) + at(chunk, cell) * sum_.element_bytes();
  }
  int rank_of(int machine) const { return layout_.on_rail(machine, slice_.rail); }
  void send_sum(Chunk& chunk, const Move& move);
  void request_sum(Chunk& chunk, int machine, size_t first, size_t last);
  void send_total(Chunk& chunk, int machine, size_t first, size_t last);
  void request_total(Chunk& chunk, std::vector<Transfer>& requested, const Move& move);
  /// Waits for a message, unless it was empty and so was never sent.
  void wait(Transfer& transfer) {
    if (transfer.work) links_.finish(transfer, timeout_);
  }

  const Layout& layout_;
  const SumOrder& order_;
  Links& links_;
  const PieceSum& sum_;
  const Segment& segment_;
  const Slice slice_;
  const Tags tags_;
  const std::chrono::milliseconds timeout_;
  const HalvingPlan plan_;
  size_t buffer_ = 0;  ///< bytes for the partial sums of a chunk
};

}  // namespace lockstep::hierarchical_engine
