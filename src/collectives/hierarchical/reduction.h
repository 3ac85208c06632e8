#pragma once

#include "collectives/hierarchical/operation.h"
#include "collectives/shm/kernels/element.h"

namespace lockstep::hierarchical_engine {

/// An all_reduce, reduce or reduce_scatter. Ranks meet once, when the data of all is in place; then each rank adds its
/// pieces (pieces.h) in the memory of all ranks of its machine, exchanges partial sums with the ranks of the same
/// number on the other machines, and writes the totals where they belong, for all ranks of its machine. Several pieces
/// are under way at once: while one travels, the next is added. Then ranks meet again.
///
/// Partial sums of fp16 and bf16 travel in fp32, so that there is one rounding, at the end, as in shared memory.
class Reduction {
 public:
  Reduction(Equipment& equipment, const shm::Request& request, uint32_t tag, std::chrono::milliseconds timeout);

  void run();

 private:
  /// A piece under way: its buffers and its messages.
  struct Flight {
    Piece piece;
    std::byte* own;                        ///< this machine's partial sums
    std::vector<std::byte*> theirs;        ///< each other machine's
    std::vector<Transfer> sent, received;  ///< of partial sums
    Transfer total;                        ///< from the home machine
  };
  /// A part of each row that is reduced between two meetings.
  void run_segment(size_t begin, size_t count);
  void fly(const std::vector<Piece>& pieces);
  void start(Flight& flight);
  void finish(Flight& flight);
  void add_partials(const Flight& flight);
  void add_total(const Flight& flight);
  void write_total(const std::byte* sum, const Piece& piece) const;

  bool is_for_all() const { return request_.kind == shm::OperationKind::kAllReduce; }
  bool is_scattered() const { return request_.kind == shm::OperationKind::kReduceScatter; }
  bool adds(const Piece& piece) const { return piece.home == Piece::kEverywhere || piece.home == layout_.here(); }
  size_t rows() const { return is_scattered() ? static_cast<size_t>(layout_.world_size()) : 1; }
  /// Where the piece lies in a local rank's memory, and where totals of this rank's pieces go.
  std::byte* place(int local, const Piece& piece) const;
  std::vector<void*> targets(const Piece& piece) const;
  void lay_out_inputs(size_t begin, size_t count);
  void take_result(size_t begin, size_t count);

  const Layout& layout_;
  const SumOrder& order_;
  Machine& machine_;
  Links& links_;
  Equipment& equipment_;
  const shm::Request& request_;
  const uint32_t tag_, total_tag_;
  const std::chrono::milliseconds timeout_;
  const size_t element_;  ///< bytes
  const bool widened_;    ///< partial sums travel in fp32
  const shm::DataType travelling_type_;
  const size_t travelling_;  ///< bytes of an element of a partial sum
  const shm::ReduceOp op_;   ///< of the additions: a mean is a sum that is divided at the end

  // Of the segment.
  size_t begin_ = 0;
  bool staged_ = false;
  std::byte* mine_ = nullptr;  ///< what this rank shows to the others
  size_t stride_ = 0;          ///< bytes from row to row
  std::vector<Card> cards_;
  std::vector<Transfer> totals_sent_;
};

}  // namespace lockstep::hierarchical_engine
