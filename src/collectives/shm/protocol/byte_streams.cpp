#include "collectives/shm/protocol/byte_streams.h"

#include <algorithm>
#include <cstring>

#include "collectives/shm/kernels/write_lines.h"

namespace lockstep::shm {
namespace {

constexpr size_t kLargestPiece = size_t{16} << 10, kShortestPiece = size_t{2} << 10;

/// GCC knows the greatest size, and would put `rep movs` here, which takes as long to start as a small copy.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  asm("" : "+r"(bytes));
  std::memcpy(to, from, bytes);
}

size_t piece_of(size_t in_flight) { return std::clamp<size_t>(in_flight / 4, kCacheLine, kLargestPiece); }

}  // namespace

ByteStreams::ByteStreams(const World& world)
    : world_(world),
      block_(world.geometry().cell_bytes),
      in_flight_(Cells::most_in_flight(world.geometry())),
      piece_(piece_of(in_flight_)),
      out_(static_cast<size_t>(world.size())),
      in_(static_cast<size_t>(world.size())) {
  cells_.reserve(out_.size());
  for (int r = 0; r < world.size(); ++r) {
    cells_.emplace_back(world, r);
    // Both ends of a stream begin with the same number.
    End &out = out_[static_cast<size_t>(r)], &in = in_[static_cast<size_t>(r)];
    out.moved = out.published = out.others = out.seen = world.mine().written[r].bytes.load(std::memory_order_relaxed);
    in.moved = in.published = in.others = world.mine().consumed[r].bytes.load(std::memory_order_relaxed);
  }
}

size_t ByteStreams::room(int to, size_t wanted) {
  End& end = out_[static_cast<size_t>(to)];
  if (in_flight_ - (end.moved - end.others) < wanted) collect(to, end);
  return in_flight_ - (end.moved - end.others);
}

void ByteStreams::collect(int to, End& end) {
  const StreamEnd& receiver = world_.control(to).consumed[world_.rank()];
  end.others = receiver.bytes.load(std::memory_order_acquire);  // from read(): those bytes may be written again
  for (; end.others - end.seen >= block_; end.seen += block_) {
    const Cells::Cell cell = receiver.cells[end.seen_blocks++ % StreamEnd::kBlocks];
    if (cell != kNoCell) cells_[static_cast<size_t>(to)].add(cell);
  }
}

size_t ByteStreams::available(int from, size_t wanted) {
  End& end = in_[static_cast<size_t>(from)];
  if (end.others - end.moved < wanted)  // from write(): those bytes are there
    end.others = world_.control(from).written[world_.rank()].bytes.load(std::memory_order_acquire);
  return end.others - end.moved;
}

std::span<std::byte> ByteStreams::place_to_write(int to) {
  End& end = out_[static_cast<size_t>(to)];
  Cells& cells = cells_[static_cast<size_t>(to)];
  if (end.cell == kNoCell) end.begun[end.block % StreamEnd::kBlocks] = end.cell = cells.take();
  return {cells.data(end.cell) + end.at, block_ - end.at};
}

std::span<const std::byte> ByteStreams::place_to_read(int from, End& end) const {
  if (end.cell == kNoCell) end.cell = world_.control(from).written[world_.rank()].cells[end.block % StreamEnd::kBlocks];
  return {cells_[static_cast<size_t>(from)].data(end.cell) + end.at, block_ - end.at};
}

void ByteStreams::copy_in(int to, const std::byte* data, size_t bytes, CopyFunction copy) {
  End& end = out_[static_cast<size_t>(to)];
  while (bytes > 0) {
    const std::span<std::byte> place = place_to_write(to);
    const size_t count = std::min(bytes, place.size());
    copy(place.data(), data, count);
    end.move_on(count, block_);
    data += count;
    bytes -= count;
  }
}

void ByteStreams::peek(int from, void* head, size_t bytes) const {
  End end = in_[static_cast<size_t>(from)];
  auto* data = static_cast<std::byte*>(head);
  while (bytes > 0) {
    const std::span<const std::byte> place = place_to_read(from, end);
    const size_t count = std::min(bytes, place.size());
    copy_bytes(data, place.data(), count);
    end.move_on(count, block_);
    data += count;
    bytes -= count;
  }
}

void ByteStreams::copy_out(int from, std::byte* data, size_t bytes, CopyFunction copy) {
  End& end = in_[static_cast<size_t>(from)];
  while (bytes > 0) {
    const std::span<const std::byte> place = place_to_read(from, end);
    const size_t count = std::min(bytes, place.size());
    copy(data, place.data(), count);
    const uint64_t block = end.block;
    const Cells::Cell cell = end.cell;
    if (end.move_on(count, block_))
      world_.mine().consumed[from].cells[block % StreamEnd::kBlocks] = cells_[static_cast<size_t>(from)].keep(cell);
    data += count;
    bytes -= count;
  }
}

void ByteStreams::publish(int to, std::memory_order order) {
  End& end = out_[static_cast<size_t>(to)];
  StreamEnd& written = world_.mine().written[to];
  // Not earlier: the receiver may be polling this line.
  for (const uint64_t begun = end.block + (end.cell != kNoCell ? 1 : 0); end.announced != begun; ++end.announced)
    written.cells[end.announced % StreamEnd::kBlocks] = end.begun[end.announced % StreamEnd::kBlocks];
  written.bytes.store(end.moved, order);
}

void ByteStreams::begin(int to, const void* head, size_t bytes) {
  copy_in(to, static_cast<const std::byte*>(head), bytes, copy_bytes);
}

size_t ByteStreams::write(int to, const void* data, size_t bytes) {
  End& end = out_[static_cast<size_t>(to)];
  // Ranks that answer each other touch its bytes four times.
  const CopyFunction copy = leave_caches(4 * bytes) ? copy_without_fetching : copy_bytes;
  size_t count = 0;
  while (count < bytes) {
    // The receiver begins with a short one, and lines are published whole.
    const size_t longest = std::clamp(std::max(count, bytes / 8), std::min(kShortestPiece, piece_), piece_);
    const size_t wanted = std::min({bytes - count, longest - end.at % kCacheLine, block_ - end.at});
    const size_t piece = std::min(room(to, wanted), wanted);
    if (piece == 0) break;
    copy_in(to, static_cast<const std::byte*>(data) + count, piece, copy);
    count += piece;
    if (count < bytes) publish(to, std::memory_order_release);  // as below
  }
  if (end.published == end.moved) return 0;
  end.published = end.moved;
  publish(to, std::memory_order_seq_cst);  // releases the bytes to available(); seq_cst for notify()
  world_.notify();
  return count;
}

void ByteStreams::open(int from, void* head, size_t bytes) {
  copy_out(from, static_cast<std::byte*>(head), bytes, copy_bytes);
}

size_t ByteStreams::read(int from, void* data, size_t bytes) {
  End& end = in_[static_cast<size_t>(from)];
  Word& consumed = world_.mine().consumed[from].bytes;
  const CopyFunction copy = leave_caches(4 * bytes) ? stream_copy : copy_bytes;
  size_t count = 0;
  while (count < bytes) {
    const size_t piece = std::min({bytes - count, available(from, 1), piece_});
    if (piece == 0) break;
    copy_out(from, static_cast<std::byte*>(data) + count, piece, copy);
    count += piece;
    if (count < bytes) consumed.store(end.moved, std::memory_order_release);  // as below
  }
  if (end.published == end.moved) return 0;
  end.published = end.moved;
  consumed.store(end.moved, std::memory_order_seq_cst);  // releases the reads to room(); seq_cst for notify()
  world_.notify();
  return count;
}

}  // namespace lockstep::shm
