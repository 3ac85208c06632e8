#include "collectives/shm/protocol/rounds.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "collectives/shm/kernels/stream_copy.h"
#include "collectives/shm/kernels/take_over.h"
#include "rank_page/rank_board.h"

namespace lockstep::shm {
namespace {

/// Of each block, from memory that the others can access, and from other memory.
constexpr size_t kOneWayRound = size_t{64} << 10;
constexpr size_t kLongestCopied = size_t{32} << 10, kShortestCopied = size_t{4} << 10;

/// Ranks whose package the others read where it is, as bits.
uint64_t read_in_place(const Operation& operation) {
  return operation.request.kind == OperationKind::kAllReduce ? 0 : operation.resident | operation.staged;
}

/// Bytes of every block that one round moves.
size_t bytes_of_round(const World& world, const Operation& operation) {
  const Transfer& transfer = operation.transfer;
  const size_t blocks = transfer.has_block_per_rank() ? static_cast<size_t>(world.size()) : 1;
  size_t bytes = world.geometry().chunk_bytes;
  // Where data goes one way, one rank writes a round while others read the one before, so short rounds overlap sooner.
  // Where ranks take turns on their processors every round costs switches instead (4 ranks on 2: 16 MiB 4.4 ms,
  // not 2.4).
  if (has_root(operation.request.kind) && world.spin()) {
    const size_t quarter = Geometry::round_up(transfer.block_bytes() / 4, 4096);
    const size_t copied = std::clamp(quarter, kShortestCopied, kLongestCopied) * blocks;
    bytes = std::min(bytes, read_in_place(operation) == 0 ? copied : kOneWayRound);
  }
  if (blocks > 1) bytes = bytes / blocks / kCacheLine * kCacheLine;
  if (operation.request.kind == OperationKind::kAllReduce || operation.request.kind == OperationKind::kAllToAllUneven)
    return bytes;
  return std::min(bytes, Geometry::round_up(transfer.block_bytes(), kCacheLine));
}

/// Writing to a line that another rank has read and still has in its caches is slow. So two ranks that both send write
/// where they have read before; the others go through an area that is larger than those caches, unless the data are.
ChunkSlots slots_of(const World& world, const Operation& operation, size_t round_bytes, const ChunkArea& area) {
  const Geometry& geometry = world.geometry();
  const OperationKind kind = operation.request.kind;
  const bool one_way = has_root(kind), uneven = kind == OperationKind::kAllToAllUneven;
  if (kind == OperationKind::kAllReduce) return {.stride = geometry.chunk_bytes, .count = geometry.chunks};
  if (!one_way && !uneven && read_in_place(operation) == 0 && world.size() == 2)
    return {.stride = geometry.chunk_bytes, .count = geometry.chunks, .exchanged = true};
  ChunkSlots slots{.stride = round_bytes, .count = geometry.chunks, .in_area = true};
  if (operation.transfer.has_block_per_rank()) slots.stride *= static_cast<size_t>(world.size());
  const uint64_t room = geometry.area_bytes / slots.stride;
  slots.count =
      one_way || operation.transfer.block_bytes() <= geometry.chunk_bytes ? room : std::min(room, slots.count);
  slots.first = (area.at + slots.stride - 1) / slots.stride % slots.count;
  return slots;
}

}  // namespace

Rounds::Rounds(const World& world, const Operation& operation, const ChunkArea& area)
    : world_(world),
      operation_(operation),
      area_(area),
      in_slices_(operation.request.kind == OperationKind::kAllReduce),
      direct_((read_in_place(operation) >> world.rank() & 1) != 0),
      round_bytes_(bytes_of_round(world, operation)),
      slots_(slots_of(world, operation, round_bytes_, area)) {
  const Transfer& transfer = operation.transfer;
  const int me = world.rank();
  size_t sent = 0, received = 0;
  for (int r = 0; r < world.size(); ++r) {
    if (r == me) continue;
    if (transfer.takes_from(r, me)) sent = std::max(sent, transfer.send_bytes(r)), readers_ |= world.bit(r);
    if (transfer.takes_from(me, r)) received = std::max(received, transfer.receive_bytes(r));
  }
  fills_ = direct_ ? 0 : rounds_for(sent);
  drains_ = rounds_for(received);
  reductions_ = in_slices_ ? drains_ : 0;
}

std::byte* Rounds::chunk(int rank, uint64_t round) const {
  const bool in_others = slots_.exchanged && (area_.exchanges + slots_.turn(round)) % 2 == 1;
  return world_.chunks(in_others ? 1 - rank : rank, slots_.in_area) + slots_.at(round);
}

size_t Rounds::block_at(int rank) const {
  return operation_.transfer.has_block_per_rank() ? static_cast<size_t>(rank) * round_bytes_ : 0;
}

ChunkArea Rounds::area_after() const {
  ChunkArea after{area_.rounds + count(), slots_.at(count()), area_.exchanges};
  if (slots_.exchanged) after.exchanges += slots_.turn(count() + slots_.count - 1);
  return after;
}

uint64_t Rounds::rounds_for(size_t bytes) const { return (bytes + round_bytes_ - 1) / round_bytes_; }

size_t Rounds::longest_block() const {
  if (operation_.request.kind != OperationKind::kAllToAllUneven) return operation_.transfer.block_bytes();
  size_t longest = 0;
  for (int r = 0; r < world_.size(); ++r)
    longest = std::max<size_t>(longest, world_.line(r, operation_.sequence).where.longest);
  return longest;
}

Range Rounds::range(uint64_t round) const {
  const size_t block =
      operation_.request.kind == OperationKind::kAllToAllUneven ? SIZE_MAX : operation_.transfer.block_bytes();
  const size_t begin = round * round_bytes_;
  return {begin, std::min(begin + round_bytes_, block)};
}

Range Rounds::slice(int rank, Range whole) const {
  const Range part = slice_of(rank, world_.size(), whole.bytes(), kCacheLine);
  return {whole.begin + part.begin, whole.begin + part.end};
}

bool Rounds::all_reached(Word Control::*word, uint64_t ranks, uint64_t value, uint64_t& blocked_on) const {
  bool all = true;
  for (; ranks != 0; ranks &= ranks - 1) {
    const int r = std::countr_zero(ranks);
    // From publish(): `filled`, `reduced`: data to read. `drained`, and `finished` from finish(): chunks to write
    // again.
    if (reached((world_.control(r).*word).load(std::memory_order_acquire), value)) continue;
    blocked_on |= world_.bit(r);
    all = false;
  }
  return all;
}

bool Rounds::may_fill(uint64_t round, uint64_t& blocked_on) const {
  // The first rounds reuse chunks of an earlier operation, which any rank may have read.
  if (round < slots_.count)
    return all_reached(&Control::finished, world_.others(), operation_.sequence - 1, blocked_on);
  if (in_slices_ || slots_.exchanged) return drained_ > round - slots_.count;  // after the others: see may_drain()
  uint64_t still_reading = 0;
  const uint64_t old = round - slots_.count;
  for (uint64_t ranks = readers_; ranks != 0; ranks &= ranks - 1) {
    const int r = std::countr_zero(ranks);
    if (operation_.transfer.send_bytes(r) > old * round_bytes_) still_reading |= world_.bit(r);
  }
  return all_reached(&Control::drained, still_reading, key(old + 1), blocked_on);
}

bool Rounds::may_reduce(uint64_t round, uint64_t& blocked_on) const {
  return round < filled_ && all_reached(&Control::filled, world_.others(), key(round + 1), blocked_on);
}

bool Rounds::may_drain(uint64_t round, uint64_t& blocked_on) const {
  if (in_slices_)
    return round < reduced_ && all_reached(&Control::reduced, world_.others(), key(round + 1), blocked_on);
  uint64_t sources = 0;
  for (uint64_t ranks = world_.others() & ~read_in_place(operation_); ranks != 0; ranks &= ranks - 1) {
    const int r = std::countr_zero(ranks);
    if (operation_.transfer.takes_from(world_.rank(), r) && operation_.transfer.receive_bytes(r) > round * round_bytes_)
      sources |= world_.bit(r);
  }
  return all_reached(&Control::filled, sources, key(round + 1), blocked_on);
}

void Rounds::publish(Word& word, uint64_t rounds) {
  word.store(key(rounds), std::memory_order_seq_cst);  // releases what was written or read to all_reached()
  world_.notify();
}

void Rounds::fill(uint64_t round) {
  std::byte* to = chunk(world_.rank(), round);
  const Range whole = range(round);
  if (in_slices_) {
    // All but this rank's own slice, which nobody else reads before it holds the sum.
    const Range own = slice(world_.rank(), whole);
    const auto* input = static_cast<const std::byte*>(operation_.request.input);
    std::memcpy(to, input + whole.begin, own.begin - whole.begin);
    std::memcpy(to + (own.end - whole.begin), input + own.end, whole.end - own.end);
  } else {
    // Ranks that exchange chunks have the one block that moves at the beginning.
    const size_t before = slots_.exchanged ? block_at(1 - world_.rank()) : 0;
    operation_.transfer.pack(to - before, round_bytes_, whole.begin, whole.end);
  }
  filled_ = round + 1;
  publish(world_.mine().filled, round + 1);
}

void Rounds::reduce(uint64_t round) {
  const Range whole = range(round), own = slice(world_.rank(), whole);
  const int me = world_.rank();
  const void* inputs[kMaxRanks];
  void* outputs[kMaxRanks];
  for (int r = 0; r < world_.size(); ++r) inputs[r] = outputs[r] = chunk(r, round) + (own.begin - whole.begin);
  inputs[me] = static_cast<const std::byte*>(operation_.request.input) + own.begin;
  outputs[me] = static_cast<std::byte*>(operation_.request.output) + own.begin;
  const size_t element = element_bytes(operation_.request.type);
  reduce_and_take_over(
      operation_.reduce,
      {outputs, world_.size(), inputs, world_.size(), own.bytes() / element, operation_.factors.data()}, me, element);
  reduced_ = round + 1;
  publish(world_.mine().reduced, round + 1);
}

const std::byte* Rounds::source(int rank, uint64_t round) const {
  if ((read_in_place(operation_) >> rank & 1) == 0)
    return chunk(rank, round) + (slots_.exchanged ? 0 : block_at(world_.rank()));
  const auto& where = world_.line(rank, operation_.sequence).where;
  const bool resident = (operation_.resident >> rank & 1) != 0;
  const std::byte* package = resident ? world_.resident(rank) + where.resident : world_.eager(rank) + where.eager;
  const size_t block = operation_.transfer.has_block_per_rank() ? static_cast<size_t>(world_.rank()) : 0;
  return package + block * operation_.transfer.block_bytes() + round * round_bytes_;
}

void Rounds::drain(uint64_t round) {
  const Range whole = range(round);
  if (in_slices_) return drain_sums(round, whole);
  const std::byte* from[kMaxRanks];
  for (int r = 0; r < world_.size(); ++r) from[r] = r == world_.rank() ? nullptr : source(r, round);
  operation_.transfer.unpack(from, whole.begin, whole.end, operation_.reduce, operation_.factors.data());
  drained_ = round + 1;
  publish(world_.mine().drained, round + 1);
}

void Rounds::drain_sums(uint64_t round, Range whole) {
  auto* output = static_cast<std::byte*>(operation_.request.output);
  const std::byte* sums = chunk(world_.rank(), round);
  const Range own = slice(world_.rank(), whole);
  // What is reduced in place is in the caches now, or nowhere.
  const bool in_place = operation_.request.input == operation_.request.output;
  const CopyFunction move =
      result_copy(in_place ? 0 : 2 * static_cast<size_t>(world_.size()) * operation_.transfer.block_bytes());
  move(output + whole.begin, sums, own.begin - whole.begin);
  move(output + own.end, sums + (own.end - whole.begin), whole.end - own.end);
  drained_ = round + 1;  // nobody waits for this
}

bool Rounds::step(uint64_t& blocked_on) {
  uint64_t blocked;
  bool moved;
  do {
    moved = false;
    blocked = 0;
    if (drained_ < drains_ && may_drain(drained_, blocked)) drain(drained_), moved = true;
    if (reduced_ < reductions_ && may_reduce(reduced_, blocked)) reduce(reduced_), moved = true;
    if (filled_ < fills_ && may_fill(filled_, blocked)) fill(filled_), moved = true;
    if (moved) own_page().beat();  // one collective may move for longer than a launcher waits
  } while (moved);
  blocked_on |= blocked;
  if (drained_ < drains_ || reduced_ < reductions_ || filled_ < fills_) return false;
  // The caller may change resident input once every rank has read it.
  return (operation_.resident >> world_.rank() & 1) == 0 || in_slices_ ||
         all_reached(&Control::drained, readers_, key(rounds_for(operation_.transfer.block_bytes())), blocked_on);
}

}  // namespace lockstep::shm
