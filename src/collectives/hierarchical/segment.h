#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "collectives/hierarchical/layout.h"
#include "collectives/hierarchical/machine.h"
#include "collectives/hierarchical/pieces.h"
#include "collectives/shm/protocol/request.h"

namespace lockstep::hierarchical_engine {

/// A part of each row of a reduction, which is reduced between two meetings: where it lies in the memory of all ranks
/// of the machine, and where its totals go.
class Segment {
 public:
  /// Elements [begin, begin + count) of each row. Copies what the others cannot reach to where they can, and meets
  /// them.
  Segment(const Layout& layout, Machine& machine, const shm::Request& request, size_t begin, size_t count, uint32_t tag,
          std::chrono::milliseconds timeout);

  /// Most elements of a row that one segment has.
  static size_t most_elements(const Layout& layout, const shm::Request& request);

  size_t count() const { return count_; }
  /// Where the piece lies in a local rank's memory.
  std::byte* place(int local, const Piece& piece) const;
  /// Where its total goes, in the memory of all ranks of the machine that get it.
  std::vector<void*> targets(const Piece& piece) const;
  /// After the last meeting: what lies elsewhere goes to this rank's output.
  void take_result() const;

 private:
  void lay_out_inputs();

  const Layout& layout_;
  Machine& machine_;
  const shm::Request& request_;
  const size_t begin_, count_;
  const size_t element_;       ///< bytes
  std::byte* mine_ = nullptr;  ///< what this rank shows to the others
  size_t stride_ = 0;          ///< bytes from row to row
  std::vector<Card> cards_;    ///< of all ranks of the machine
};

}  // namespace lockstep::hierarchical_engine
