#include "collectives/shm/protocol/byte_streams.h"

#include <algorithm>
#include <cstring>

#include "collectives/shm/kernels/write_lines.h"

namespace lockstep::shm {
namespace {

constexpr size_t kLargestPiece = size_t{8} << 10, kShortestPiece = size_t{2} << 10;
/// More is not in flight to a rank: it waits for the receiver. A ring is longer, for a sender is slow to write to lines
/// that the receiver has read and still has in its caches: through 2 MiB messages of 8 KiB and more take 0.3 to 0.4 of
/// the time that they take through 64 KiB (AMD EPYC, 1 MiB of second-level cache a core).
constexpr size_t kInFlight = size_t{64} << 10;
/// The least bytes that leave the caches before they are read: these are copied in without fetching their lines.
constexpr size_t kBeyondCaches = size_t{8} << 20;

/// GCC knows the greatest size, and would put `rep movs` here, which takes as long to start as a small copy.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  asm("" : "+r"(bytes));
  std::memcpy(to, from, bytes);
}

size_t piece_of(size_t in_flight) { return std::clamp<size_t>(in_flight / 4, kCacheLine, kLargestPiece); }

}  // namespace

ByteStreams::ByteStreams(const World& world)
    : world_(world),
      capacity_(world.geometry().channel_bytes),
      in_flight_(std::min(capacity_, kInFlight)),
      piece_(piece_of(in_flight_)),
      out_(static_cast<size_t>(world.size())),
      in_(static_cast<size_t>(world.size())) {
  for (int r = 0; r < world.size(); ++r) {
    // Both ends of a stream begin with the same number.
    const auto i = static_cast<size_t>(r);
    out_[i].moved = out_[i].published = out_[i].others = world.mine().written[r].value.load(std::memory_order_relaxed);
    in_[i].moved = in_[i].published = in_[i].others = world.mine().consumed[r].value.load(std::memory_order_relaxed);
  }
}

void ByteStreams::commit(int to) {
  if ((committed_ & world_.bit(to)) != 0) return;
  const size_t begin = world_.geometry().channel_at(to);
  world_.segment(world_.rank())->commit_apart(begin, begin + capacity_);
  committed_ |= world_.bit(to);
}

size_t ByteStreams::room(int to, size_t wanted) {
  End& end = out_[static_cast<size_t>(to)];
  if (in_flight_ - (end.moved - end.others) < wanted)  // from read(): those bytes may be written again
    end.others = world_.control(to).consumed[world_.rank()].value.load(std::memory_order_acquire);
  return in_flight_ - (end.moved - end.others);
}

size_t ByteStreams::available(int from, size_t wanted) {
  End& end = in_[static_cast<size_t>(from)];
  if (end.others - end.moved < wanted)  // from write(): those bytes are there
    end.others = world_.control(from).written[world_.rank()].value.load(std::memory_order_acquire);
  return end.others - end.moved;
}

void ByteStreams::copy_in(int to, const std::byte* data, size_t bytes, CopyFunction copy) {
  End& end = out_[static_cast<size_t>(to)];
  std::byte* const ring = world_.channel(world_.rank(), to);
  const size_t first = std::min(bytes, capacity_ - end.at);
  copy(ring + end.at, data, first);
  if (bytes > first) copy(ring, data + first, bytes - first);
  end.at = end.at + bytes < capacity_ ? end.at + bytes : end.at + bytes - capacity_;
  end.moved += bytes;
}

void ByteStreams::peek(int from, void* head, size_t bytes) const {
  const End& end = in_[static_cast<size_t>(from)];
  const std::byte* const ring = world_.channel(from, world_.rank());
  const size_t first = std::min(bytes, capacity_ - end.at);
  copy_bytes(static_cast<std::byte*>(head), ring + end.at, first);
  if (bytes > first) copy_bytes(static_cast<std::byte*>(head) + first, ring, bytes - first);
}

void ByteStreams::copy_out(int from, std::byte* data, size_t bytes) {
  End& end = in_[static_cast<size_t>(from)];
  peek(from, data, bytes);
  end.at = end.at + bytes < capacity_ ? end.at + bytes : end.at + bytes - capacity_;
  end.moved += bytes;
}

void ByteStreams::begin(int to, const void* head, size_t bytes) {
  copy_in(to, static_cast<const std::byte*>(head), bytes, copy_bytes);
}

size_t ByteStreams::write(int to, const void* data, size_t bytes) {
  End& end = out_[static_cast<size_t>(to)];
  Word& written = world_.mine().written[to].value;
  // At least two pieces, and lines are published whole.
  const size_t longest = std::clamp(bytes / 2, std::min(kShortestPiece, piece_), piece_);
  const CopyFunction copy = bytes < kBeyondCaches ? copy_bytes : copy_without_fetching;
  size_t count = 0;
  while (count < bytes) {
    const size_t wanted = std::min(bytes - count, longest - end.at % kCacheLine);
    const size_t piece = std::min(room(to, wanted), wanted);
    if (piece == 0) break;
    copy_in(to, static_cast<const std::byte*>(data) + count, piece, copy);
    count += piece;
    if (count < bytes) written.store(end.moved, std::memory_order_release);  // as below
  }
  if (end.published == end.moved) return 0;
  end.published = end.moved;
  written.store(end.moved, std::memory_order_seq_cst);  // releases the bytes to available(); seq_cst for notify()
  world_.notify();
  return count;
}

void ByteStreams::open(int from, void* head, size_t bytes) { copy_out(from, static_cast<std::byte*>(head), bytes); }

size_t ByteStreams::read(int from, void* data, size_t bytes) {
  End& end = in_[static_cast<size_t>(from)];
  Word& consumed = world_.mine().consumed[from].value;
  size_t count = 0;
  while (count < bytes) {
    const size_t piece = std::min({bytes - count, available(from, 1), piece_});
    if (piece == 0) break;
    copy_out(from, static_cast<std::byte*>(data) + count, piece);
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
