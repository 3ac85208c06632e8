#include "collectives/shm/protocol/mover.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "collectives/shm/kernels/take_over.h"
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

void Mover::finish(const Operation& operation) {
  if (operation.rounds)
    area_ = operation.rounds->area_after();
  else
    area_.rounds += operation.round_count;
}

bool Mover::move_in_rounds(Operation& operation, uint64_t& blocked_on) {
  if (!operation.rounds) {
    operation.rounds = std::make_unique<Rounds>(world_, operation, area_);
    operation.round_count = operation.rounds->count();
  }
  const uint64_t before = operation.rounds->moved();
  const bool over = operation.rounds->step(blocked_on);
  rounds_moved_ += operation.rounds->moved() - before;
  return over;
}

bool Mover::move_in_place(Operation& operation, uint64_t& blocked_on) {
  const uint64_t done = area_.rounds + 1;
  if ((operation.summed & world_.bit(world_.rank())) == 0) {
    operation.round_count = 1;
    reduce_own_slice(operation);
    operation.summed = world_.bit(world_.rank());
    // Releases the slice, in everyone's buffer, to the loads below.
    world_.mine().reduced.store(done, std::memory_order_seq_cst);
    world_.notify();
  }
  uint64_t left = world_.others() & ~operation.summed;
  for (uint64_t ranks = left; ranks != 0; ranks &= ranks - 1) {
    const int r = std::countr_zero(ranks);
    // From the store above: that slice of this rank's buffer is summed, and r no longer reads its input.
    if (!reached(world_.control(r).reduced.load(std::memory_order_acquire), done)) {
      blocked_on |= world_.bit(r);
      continue;
    }
    take_slice(operation, r);
    operation.summed |= world_.bit(r);
    left &= ~world_.bit(r);
  }
  return left == 0;
}

void Mover::take_slice(const Operation& operation, int from) {
  const int rank = world_.rank();
  if ((operation.staged >> rank & 1) == 0) return;
  const Range slice = operation.transfer.slice(from);
  const std::byte* staged = world_.eager(rank) + world_.line(rank, operation.sequence).where.eager;
  if (slice.bytes() > 0)
    std::memcpy(static_cast<std::byte*>(operation.request.output) + slice.begin, staged + slice.begin, slice.bytes());
}

void Mover::reduce_own_slice(Operation& operation) {
  const int rank = world_.rank(), size = world_.size();
  const Range own = operation.transfer.slice(rank);
  const void* inputs[kMaxRanks];
  void* outputs[kMaxRanks];
  for (int r = 0; r < size; ++r) {
    if (r == rank) {
      inputs[r] = static_cast<const std::byte*>(operation.request.input) + own.begin;
      outputs[r] = static_cast<std::byte*>(operation.request.output) + own.begin;
      continue;
    }
    const auto& where = world_.line(r, operation.sequence).where;
    if ((operation.staged >> r & 1) != 0) {
      outputs[r] = world_.eager(r) + where.eager + own.begin;
    } else {
      outputs[r] = world_.resident(r) + where.resident + own.begin;
      const size_t in_segment = world_.geometry().resident_at() + where.resident;
      populated_[static_cast<size_t>(r)].populate(*world_.segment(r), in_segment + own.begin, in_segment + own.end);
    }
    inputs[r] = outputs[r];
  }
  const size_t element = element_bytes(operation.request.type);
  const Reduction sums{outputs, size, inputs, size, own.bytes() / element, operation.factors.data()};
  // Staged data always come from the others' caches.
  if (operation.staged != 0)
    reduce_and_take_over(operation.reduce, sums, rank, element);
  else
    reduce_in_parts(operation.reduce, sums, element, share_out_);
}

}  // namespace lockstep::shm
