#include "collectives/shm/protocol/byte_streams.h"

#include <algorithm>
#include <cstring>

#include "collectives/shm/kernels/write_lines.h"

namespace lockstep::shm {
namespace {

constexpr size_t kLargestPiece = size_t{8} << 10;
/// Up to here lines are fetched for writing, some ahead, before they are copied to; more is copied without. The
/// time of the second over that of the first on 2 ranks (AMD EPYC), where the cores are close and where they are far
/// apart: 4 KiB 1.2 and 0.85, 8 KiB 1.05 and 0.8, 32 KiB 0.8 where they are close.
constexpr size_t kFetchedFirst = size_t{4} << 10;
constexpr size_t kFetchedOfStream = size_t{2} << 10;

/// GCC knows the greatest size, and would put `rep movs` here, which takes as long to start as a small copy.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  asm("" : "+r"(bytes));
  std::memcpy(to, from, bytes);
}

size_t piece_of(size_t capacity) { return std::clamp<size_t>(capacity / 4, kCacheLine, kLargestPiece); }

}  // namespace

ByteStreams::ByteStreams(const World& world)
    : world_(world),
      capacity_(world.geometry().channel_bytes),
      piece_(piece_of(capacity_)),
      out_(static_cast<size_t>(world.size())),
      in_(static_cast<size_t>(world.size())) {
  for (int r = 0; r < world.size(); ++r) {
    // Both ends of a stream begin with the same number.
    const auto i = static_cast<size_t>(r);
    out_[i].moved = out_[i].published = out_[i].others = world.mine().written[r].value.load(std::memory_order_relaxed);
    in_[i].moved = in_[i].published = in_[i].others = world.mine().consumed[r].value.load(std::memory_order_relaxed);
  }
}

size_t ByteStreams::room(int to, size_t wanted) {
  End& end = out_[static_cast<size_t>(to)];
  if (capacity_ - (end.moved - end.others) < wanted)  // from read(): those bytes may be written again
    end.others = world_.control(to).consumed[world_.rank()].value.load(std::memory_order_acquire);
  return capacity_ - (end.moved - end.others);
}

size_t ByteStreams::available(int from, size_t wanted) {
  End& end = in_[static_cast<size_t>(from)];
  if (end.others - end.moved < wanted)  // from write(): those bytes are there
    end.others = world_.control(from).written[world_.rank()].value.load(std::memory_order_acquire);
  return end.others - end.moved;
}

void ByteStreams::copy_in(int to, const std::byte* data, size_t bytes) {
  End& end = out_[static_cast<size_t>(to)];
  std::byte* const ring = world_.channel(world_.rank(), to);
  const bool fetches = bytes <= kFetchedFirst;
  for (size_t count = 0; count < bytes;) {
    const size_t part = std::min({bytes - count, capacity_ - end.at, fetches ? kFetchedOfStream : bytes});
    std::byte* const place = ring + end.at;
    end.at = end.at + part < capacity_ ? end.at + part : 0;
    if (fetches && count + part < bytes) fetch_next(to, bytes - count - part);
    (fetches ? copy_bytes : copy_without_fetching)(place, data + count, part);
    count += part;
  }
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

void ByteStreams::fetch_next(int to, size_t bytes) const {
  const size_t at = out_[static_cast<size_t>(to)].at;
  fetch_to_write(world_.channel(world_.rank(), to) + at, std::min({bytes, kFetchedOfStream, capacity_ - at}));
}

void ByteStreams::begin(int to, const void* head, size_t bytes) {
  copy_in(to, static_cast<const std::byte*>(head), bytes);
}

size_t ByteStreams::write(int to, const void* data, size_t bytes) {
  End& end = out_[static_cast<size_t>(to)];
  Word& written = world_.mine().written[to].value;
  size_t count = 0;
  while (count < bytes) {
    const size_t piece = std::min({bytes - count, room(to, std::min(bytes - count, piece_)), piece_});
    if (piece == 0) break;
    copy_in(to, static_cast<const std::byte*>(data) + count, piece);
    count += piece;
    if (count < bytes) written.store(end.moved, std::memory_order_release);  // as below
  }
  if (end.published == end.moved) return 0;
  end.published = end.moved;
  written.store(end.moved, std::memory_order_seq_cst);  // releases the bytes to available(); seq_cst for notify()
  world_.notify();
  fetch_next(to, count);  // the next message is mostly as long
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
