#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// The memory of the two streams between this rank and another one: cells of equal size. Each rank begins with those in
/// its own segment, and a cell belongs to one rank at a time: whoever has read it, owns it.
///
/// A processor is slow to write to lines that another one has in its caches. So a rank writes to the cells that it has
/// read last, as it does when ranks answer each other, and else to those that it has not used for longest: by then,
/// these have left the other's caches. It keeps only a few that it has read; for each more, it gives one back.
/// Guarded by the communicator's mutex.
class Cells {
 public:
  /// A number that both ranks use.
  using Cell = uint16_t;

  Cells(const World& world, int other);

  /// Commits this rank's own cells. REQUIRES: before take(). Throws if memory is short.
  void commit();
  /// The cell that this rank should write to next. REQUIRES: no more than most_in_flight() have been written and not
  /// read, so that there is one.
  Cell take();
  /// This rank has read the cell. Returns the cell that it gives back for it, or kNoCell.
  Cell keep(Cell cell);
  /// The other rank has given the cell back.
  void add(Cell cell) { unused_.push_back(cell); }

  std::byte* data(Cell cell) const {
    return (is_mine(cell) ? mine_ : others_) + static_cast<size_t>(cell % kMost) * bytes_;
  }
  /// In each direction.
  static size_t most_in_flight(const Geometry& geometry);

 private:
  /// Takes memory when it is first used.
  class Queue {
   public:
    explicit Queue(size_t most) : mask_(std::bit_ceil(most) - 1) {}
    size_t size() const { return end_ - begin_; }
    void push_back(Cell cell) {
      if (cells_.empty()) cells_.resize(mask_ + 1);
      cells_[end_++ & mask_] = cell;
    }
    Cell pop_back() { return cells_[--end_ & mask_]; }
    Cell pop_front() { return cells_[begin_++ & mask_]; }

   private:
    size_t mask_, begin_ = 0, end_ = 0;
    std::vector<Cell> cells_;
  };
  static constexpr Cell kMost = 1 << 15;
  static size_t most_kept(size_t cells);
  bool is_mine(Cell cell) const { return cell / kMost == mine_are_; }

  const World& world_;
  const int other_;
  const size_t bytes_, cells_, most_kept_;
  const Cell mine_are_;  ///< the upper bit of this rank's own cells
  std::byte* const mine_;
  std::byte* const others_;
  bool committed_ = false;
  size_t never_used_ = 0;  ///< the first of this rank's own cells that no message has used
  Queue kept_;             ///< read, the last one last
  Queue unused_;           ///< the one that has been so for longest first
};

}  // namespace lockstep::shm
