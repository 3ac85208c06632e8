#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hierarchical/layout.h"
#include "collectives/shm/protocol/request.h"

namespace lockstep::hierarchical_engine {

/// A part of a reduction for which each machine sends one message. Layout::on_rail names the rank of each machine that
/// serves it.
struct Piece {
  static constexpr int kEverywhere = -1;

  int row;            ///< of reduce_scatter: the rank that gets the result; else 0
  size_t begin;       ///< its first element in the row
  size_t count;       ///< its elements
  int rail;           ///< the rail that serves it
  int home;           ///< the machine that adds all partial sums, or kEverywhere: each machine does
  bool is_forwarded;  ///< the home machine then sends the total to the others
};

/// Cuts a reduction into pieces, the same on all ranks. `count`: elements of a row; `element_bytes`: of an element;
/// `travelling_bytes`: of an element of a partial sum.
///
/// An all_reduce is cut into a slice for each rail. If machines exchange whole partial sums, every byte of a slice
/// leaves every machine (machines - 1) times. If each machine adds a part of every slice and sends the total to the
/// others, it leaves 2 * (machines - 1) / machines times, as in a ring. The first way takes one exchange instead of
/// two.
std::vector<Piece> pieces_of(const shm::Request& request, size_t count, const Layout& layout, size_t element_bytes,
                             size_t travelling_bytes);

}  // namespace lockstep::hierarchical_engine
