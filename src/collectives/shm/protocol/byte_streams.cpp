#include "collectives/shm/protocol/byte_streams.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "collectives/shm/kernels/write_lines.h"

namespace lockstep::shm {
namespace {

/// Pieces of 2 KiB in 8 KiB that are used again and again, over pieces of 8 KiB through all of a ring of 64: 0.7 of the
/// time of 4 KiB, 0.55 of 8 to 64 KiB, 0.3 of 256 KiB (AMD EPYC, two cores that lie far apart).
constexpr size_t kLargestPiece = size_t{2} << 10;
constexpr size_t kEarlyTurn = size_t{8} << 10;
/// Beyond the caches longer pieces through all of the ring are faster: 16 MiB take 1.1 of the time in short ones.
constexpr size_t kShortInLong = 4;

/// GCC knows the greatest size, and would put `rep movs` here, which takes as long to start as a small copy.
void copy_bytes(std::byte* to, const std::byte* from, size_t bytes) {
  asm("" : "+r"(bytes));
  std::memcpy(to, from, bytes);
}

size_t short_piece(size_t capacity) { return std::clamp<size_t>(capacity / 4, kCacheLine, kLargestPiece); }

/// Ranks that take turns on their processors move as much as they can in each.
size_t early_turn_of(const World& world) {
  const size_t capacity = world.geometry().channel_bytes;
  return world.spin() ? std::min(capacity / 2, kEarlyTurn) : capacity;
}

}  // namespace

ByteStreams::ByteStreams(const World& world)
    : world_(world),
      capacity_(world.geometry().channel_bytes),
      piece_(short_piece(capacity_)),
      early_turn_(early_turn_of(world)),
      out_(static_cast<size_t>(world.size())),
      in_(static_cast<size_t>(world.size())) {
  if (capacity_ > RingPlace::kLargestRing) throw Error("a channel has at most 1 MiB");
  for (int r = 0; r < world.size(); ++r) {
    // Both ends of a stream begin at the same place.
    const auto i = static_cast<size_t>(r);
    const auto start = [](const Word& word) { return RingPlace::of(word.load(std::memory_order_relaxed)); };
    out_[i].here = out_[i].published = out_[i].other = start(world.mine().written[r].value);
    in_[i].here = in_[i].published = in_[i].other = start(world.mine().consumed[r].value);
  }
}

/// Bytes that can be written before the sender turns or waits.
size_t ByteStreams::ahead(const End& end) const {
  return (end.here.lap == end.other.lap ? capacity_ : end.other.at) - end.here.at;
}

size_t ByteStreams::room(int to, size_t wanted, bool in_cache) {
  End& end = out_[static_cast<size_t>(to)];
  const bool may_turn_early = in_cache && end.here.at >= early_turn_;
  if (ahead(end) >= wanted && !may_turn_early) return ahead(end);
  // From read(): those bytes may be written again.
  end.other = RingPlace::of(world_.control(to).consumed[world_.rank()].value.load(std::memory_order_acquire));
  const bool same_lap = end.here.lap == end.other.lap;
  const bool keeps_up = may_turn_early && end.here.at - end.other.at <= 2 * piece_;
  if (same_lap && (keeps_up || ahead(end) < wanted) && end.other.at >= wanted) end.here.start_lap();
  return ahead(end);
}

size_t ByteStreams::available(int from) {
  End& end = in_[static_cast<size_t>(from)];
  if (end.here == end.other || (end.here.lap != end.other.lap && end.here.at == end.other.turn))
    // From write(): those bytes are there.
    end.other = RingPlace::of(world_.control(from).written[world_.rank()].value.load(std::memory_order_acquire));
  if (end.here.lap != end.other.lap) {
    if (end.here.at < end.other.turn) return end.other.turn - end.here.at;
    end.here.start_lap();
  }
  return end.other.at - end.here.at;
}

size_t ByteStreams::piece_of(size_t bytes) const { return bytes < kBeyondCaches ? piece_ : kShortInLong * piece_; }

bool ByteStreams::has_room(int to, size_t bytes) { return room(to, bytes, /*in_cache=*/true) >= bytes; }

void ByteStreams::begin(int to, const void* head, size_t bytes) {
  RingPlace& here = out_[static_cast<size_t>(to)].here;
  copy_bytes(world_.channel(world_.rank(), to) + here.at, static_cast<const std::byte*>(head), bytes);
  here.at += bytes;
}

size_t ByteStreams::write(int to, const void* data, size_t bytes) {
  End& end = out_[static_cast<size_t>(to)];
  Word& written = world_.mine().written[to].value;
  std::byte* const ring = world_.channel(world_.rank(), to);
  const auto* const from = static_cast<const std::byte*>(data);
  size_t count = 0;
  const bool in_cache = bytes < kBeyondCaches;
  const size_t longest = std::min(piece_of(bytes), capacity_);
  while (count < bytes) {
    const size_t wanted = std::min(bytes - count, longest);
    // Pieces end where the lines do.
    const size_t piece = std::min({room(to, wanted, in_cache), wanted, longest - end.here.at % longest});
    if (piece == 0) break;
    (in_cache ? copy_bytes : copy_without_fetching)(ring + end.here.at, from + count, piece);
    end.here.at += piece;
    count += piece;
    if (count < bytes) written.store(end.here.word(), std::memory_order_release);  // as below
  }
  if (end.published == end.here) return 0;
  end.published = end.here;
  written.store(end.here.word(), std::memory_order_seq_cst);  // releases the bytes to available(); seq_cst for notify()
  world_.notify();
  return count;
}

void ByteStreams::peek(int from, void* head, size_t bytes) const {
  copy_bytes(static_cast<std::byte*>(head),
             world_.channel(from, world_.rank()) + in_[static_cast<size_t>(from)].here.at, bytes);
}

void ByteStreams::open(int from, void* head, size_t bytes) {
  peek(from, head, bytes);
  in_[static_cast<size_t>(from)].here.at += bytes;
}

size_t ByteStreams::read(int from, void* data, size_t bytes) {
  End& end = in_[static_cast<size_t>(from)];
  Word& consumed = world_.mine().consumed[from].value;
  const std::byte* const ring = world_.channel(from, world_.rank());
  const size_t longest = piece_of(bytes);
  size_t count = 0;
  while (count < bytes) {
    const size_t piece = std::min({bytes - count, available(from), longest - end.here.at % longest});
    if (piece == 0) break;
    copy_bytes(static_cast<std::byte*>(data) + count, ring + end.here.at, piece);
    end.here.at += piece;
    count += piece;
    if (count < bytes) consumed.store(end.here.word(), std::memory_order_release);  // as below
  }
  if (end.published == end.here) return 0;
  end.published = end.here;
  consumed.store(end.here.word(), std::memory_order_seq_cst);  // releases the reads to room(); seq_cst for notify()
  world_.notify();
  return count;
}

}  // namespace lockstep::shm
