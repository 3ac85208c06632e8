#pragma once

#include "collectives/hierarchical/operation.h"
#include "collectives/hierarchical/piece_sum.h"
#include "collectives/hierarchical/segment.h"

namespace lockstep::hierarchical_engine {

/// An all_reduce, reduce or reduce_scatter. Ranks meet once, when the data of all is in place. Then each rank adds its
/// pieces (pieces.h) in the memory of all ranks of its machine, exchanges partial sums with the ranks of the same
/// number on the other machines, and writes the totals to their targets for all ranks of its machine. Several pieces
/// are in flight at once: while one is sent, the next is added. Then ranks meet again. An all_reduce between many
/// machines goes by halving and doubling instead (halving.h), where that is faster.
class Reduction {
 public:
  Reduction(Equipment& equipment, const shm::Request& request, uint32_t tag, std::chrono::milliseconds timeout);

  void run();

 private:
  /// A piece in flight, with its buffers and messages.
  struct Flight {
    Piece piece;
    std::byte* own;                        ///< this machine's partial sums
    std::vector<std::byte*> theirs;        ///< each other machine's
    std::vector<Transfer> sent, received;  ///< of partial sums
    Transfer total;                        ///< from the home machine
  };
  /// By halving and doubling.
  void halve(const Segment& segment);
  /// By a direct exchange.
  void fly(const Segment& segment);
  void start(const Segment& segment, Flight& flight);
  void finish(const Segment& segment, Flight& flight);
  void add_partials(const Segment& segment, const Flight& flight);
  /// The partial sums of all machines, in the order of their ranks.
  std::vector<std::byte*> partials_of(const Flight& flight) const;
  bool adds(const Piece& piece) const { return piece.home == Piece::kEverywhere || piece.home == layout_.here(); }

  const Layout& layout_;
  const SumOrder& order_;
  Links& links_;
  Equipment& equipment_;
  const shm::Request& request_;
  const uint32_t tag_, total_tag_;
  const std::chrono::milliseconds timeout_;
  const bool halves_;
  const PieceSum sum_;
  std::vector<Transfer> totals_sent_;  ///< of the current segment
};

}  // namespace lockstep::hierarchical_engine
