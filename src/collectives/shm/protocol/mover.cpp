#include "collectives/shm/protocol/mover.h"

#include <algorithm>

#include "collectives/shm/protocol/rounds.h"

namespace lockstep::shm {

bool Mover::move_at_once(Operation& operation) {
  const Transfer& transfer = operation.transfer;
  const int rank = world_.rank();
  if (!transfer.takes(rank)) return true;
  const size_t mine = transfer.has_block_per_rank() ? static_cast<size_t>(rank) * transfer.block_bytes() : 0;
  const std::byte* from[kMaxRanks];
  for (int r = 0; r < world_.size(); ++r) {
    const Line& line = world_.line(r, operation.sequence);
    from[r] = nullptr;
    if (transfer.takes_from(rank, r))
      from[r] = (operation.method == Method::kInline ? line.data : world_.eager(r) + line.where.eager) + mine;
  }
  transfer.unpack(from, 0, transfer.block_bytes(), operation.reduce, operation.factors.data());
  return true;
}

bool Mover::move_in_rounds(Operation& operation, uint64_t& blocked_on) {
  if (!operation.rounds) {
    operation.rounds = std::make_unique<Rounds>(world_, operation, rounds_before_);
    operation.round_count = operation.rounds->count();
  }
  const uint64_t before = operation.rounds->moved();
  const bool over = operation.rounds->step(blocked_on);
  rounds_moved_ += operation.rounds->moved() - before;
  return over;
}

bool Mover::move_in_place(Operation& operation, uint64_t& blocked_on) {
  const uint64_t done = rounds_before_ + 1;
  if (!operation.slice_reduced) {
    operation.round_count = 1;
    reduce_own_slice(operation);
    operation.slice_reduced = true;
    // Releases the slice, in everyone's buffer, to the loads below.
    world_.mine().reduced.store(done, std::memory_order_seq_cst);
    world_.notify();
  }
  bool all = true;
  for (int r = 0; r < world_.size(); ++r) {
    // From the store above: all slices of this rank's buffer are sums, and nobody reads its input any longer.
    if (r == world_.rank() || reached(world_.control(r).reduced.load(std::memory_order_acquire), done)) continue;
    blocked_on |= world_.bit(r);
    all = false;
  }
  return all;
}

void Mover::reduce_own_slice(Operation& operation) {
  const int rank = world_.rank(), size = world_.size();
  const size_t bytes = operation.transfer.block_bytes(), n = static_cast<size_t>(size);
  const size_t part = Geometry::round_up((bytes + n - 1) / n, bytes >= (size_t{1} << 20) ? 4096 : kCacheLine);
  const size_t begin = std::min(bytes, static_cast<size_t>(rank) * part), end = std::min(bytes, begin + part);
  void* buffers[kMaxRanks];
  for (int r = 0; r < size; ++r) {
    const size_t at = world_.line(r, operation.sequence).where.resident;
    buffers[r] = world_.resident(r) + at + begin;
    if (r == rank) continue;
    const size_t in_segment = world_.geometry().resident_at() + at;
    populated_[static_cast<size_t>(r)].populate(*world_.segment(r), in_segment + begin, in_segment + end);
  }
  const size_t element = element_bytes(operation.request.type);
  reduce_in_parts(operation.reduce, {buffers, size, buffers, size, (end - begin) / element, operation.factors.data()},
                  element, share_out_);
}

}  // namespace lockstep::shm
