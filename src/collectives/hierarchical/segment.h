#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "collectives/hierarchical/layout.h"
#include "collectives/hierarchical/machine.h"
#include "collectives/hierarchical/pieces.h"
#include "collectives/shm/protocol/request.h"

namespace lockstep::hierarchical_engine {

/// A part of each row of a reduction, reduced between two meetings: its places in the memory of all ranks of the
/// machine, and the targets of its totals.
class Segment {
 public:
  /// Covers elements [begin, begin + count) of each row. Copies data that the other ranks cannot access to memory that
  /// they can, and meets them.
  Segment(const Layout& layout, Machine& machine, const shm::Request& request, size_t begin, size_t count, uint32_t tag,
          std::chrono::milliseconds timeout);

  /// The largest number of elements of a row in one segment.
  static size_t most_elements(const Layout& layout, const shm::Request& request);

  size_t count() const { return count_; }
  std::byte* place(int local, const Piece& piece) const;
  /// The targets of its total, in the memory of all ranks of the machine that receive it.
  std::vector<void*> targets(const Piece& piece) const;
  /// Copies results from elsewhere to this rank's output. Called after the last meeting.
  void take_result() const;

 private:
  void lay_out_inputs();

  const Layout& layout_;
  Machine& machine_;
  const shm::Request& request_;
  const size_t begin_, count_;
  const size_t element_;       ///< bytes
  std::byte* mine_ = nullptr;  ///< this rank's data, visible to the others
  size_t stride_ = 0;          ///< bytes from row to row
  std::vector<Card> cards_;    ///< of all ranks of the machine
};

}  // namespace lockstep::hierarchical_engine
