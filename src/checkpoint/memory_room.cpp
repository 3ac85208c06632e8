#include "checkpoint/memory_room.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <string>

#include "base/error.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"

namespace lockstep {
namespace {

/// The distance by which slices may move while pickles before them grow.
constexpr uint64_t kSlack = 4096;

std::string in_mebibytes(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

/// Room for pickles that grow with the numbers in them.
uint64_t with_room(uint64_t bytes) { return (bytes + bytes / 64 + (64 << 10)) / 4096 * 4096; }

/// A rank's request.
struct RoomRequest {
  uint64_t plain = 0, slices = 0, own = 0, available = 0;

  static RoomRequest of(const CheckpointMessage& message) {
    RoomRequest request{.available = static_cast<uint64_t>(message.steps)};
    std::istringstream(message.text) >> request.plain >> request.slices;
    std::istringstream(message.state) >> request.own;
    return request;
  }
};

uint64_t distance(uint64_t a, uint64_t b) { return a < b ? b - a : a - b; }

}  // namespace

void MemoryRoom::ask(CheckpointMessage& message, const Sizes& sizes) const {
  const uint64_t plain = bytes_in(sizes.slices.plain(sizes.common_bytes));
  message.text = std::to_string(plain) + ' ' + std::to_string(sizes.slices.bytes_of_rank(rank_));
  message.state = std::to_string(sizes.own_bytes);
  message.steps = static_cast<int64_t>(available_memory_bytes() + memory_.committed_bytes());
}

void MemoryRoom::check(const std::vector<CheckpointMessage>& messages, const MemoryMachines& machines) {
  std::vector<RoomRequest> ranks;
  uint64_t on_each = 0;  // machine
  for (const CheckpointMessage& message : messages) ranks.push_back(RoomRequest::of(message));
  for (const RoomRequest& rank : ranks) on_each = std::max(on_each, 2 * with_room(rank.plain));
  for (const RoomRequest& rank : ranks) on_each += 2 * with_room(rank.own);
  for (size_t on = 0; on < ranks.size(); ++on) {
    uint64_t wanted = on_each;
    for (size_t rank = 0; rank < ranks.size(); ++rank)
      if (machines.holds_slices(static_cast<int>(on), static_cast<int>(rank))) wanted += 2 * ranks[rank].slices;
    if (wanted > ranks[on].available)
      throw LimitError("two states in memory take " + in_mebibytes(wanted) + ", but only " +
                       in_mebibytes(ranks[on].available) + " are available");
  }
}

void MemoryRoom::open(const Sizes& sizes) {
  common_capacity_ = with_room(sizes.common_bytes);
  slices_ = sizes.slices;
  std::vector<ByteRange> written = share(slices_);
  for (const auto window : {MappedSlots::kCommon0, MappedSlots::kCommon1}) {
    const uint64_t at = StateMemory::common_at(window == MappedSlots::kCommon0 ? 0 : 1);
    if (slices_.empty()) {
      const ByteRange range = written.empty() ? ByteRange{} : written.front();
      memory_.open_window(window, at + range.begin, range.bytes());
      continue;
    }
    memory_.open_sparse_window(window, at, common_capacity_);
    std::vector<ByteRange> all = written;
    for (const ByteRange& range : received(slices_)) all.push_back(range);
    for (const ByteRange& range : all) {
      const uint64_t begin = range.begin - std::min(range.begin, kSlack);
      memory_.commit_in(window, at + begin, std::min(range.end + kSlack, common_capacity_) - begin);
    }
  }
  open_own(sizes.own_bytes);
}

void MemoryRoom::open_own(uint64_t own_bytes) {
  if (own_bytes > StateMemory::kOwnBytes)
    throw LimitError("what rank " + std::to_string(rank_) + " has of its own takes " + in_mebibytes(own_bytes) +
                     ", more than the reserved " + in_mebibytes(StateMemory::kOwnBytes));
  own_capacity_ = std::min(with_room(own_bytes), StateMemory::kOwnBytes);
  memory_.open_window(MappedSlots::kOwn0, StateMemory::own_at(0, rank_), own_capacity_);
  memory_.open_window(MappedSlots::kOwn1, StateMemory::own_at(1, rank_), own_capacity_);
}

bool MemoryRoom::has_room(uint64_t most_bytes, const ImageSlices& slices) const {
  if (most_bytes > common_capacity_ || !slices.is_divided_like(slices_)) return false;
  for (size_t i = 0; i < slices.storages().size(); ++i)
    if (distance(slices.storages()[i].begin, slices_.storages()[i].begin) > kSlack) return false;
  return true;
}

std::vector<ByteRange> MemoryRoom::share(const ImageSlices& slices) const {
  std::vector<ByteRange> share =
      share_of(slices.plain(common_capacity_), machines_.rank_here(), machines_.ranks_here());
  for (const ByteRange& slice : slices.of_rank(rank_)) share.push_back(slice);
  std::sort(share.begin(), share.end(), [](const ByteRange& a, const ByteRange& b) { return a.begin < b.begin; });
  return share;
}

std::vector<ByteRange> MemoryRoom::received(const ImageSlices& slices) const {
  std::vector<ByteRange> received;
  for (const int rank : machines_.sources())
    for (const ByteRange& slice : slices.of_rank(rank)) received.push_back(slice);
  return received;
}

void MemoryRoom::release_others(int slot, const ImageSlices& slices) {
  const uint64_t at = StateMemory::common_at(slot);
  for (const ImageSlices::Storage& storage : slices.storages())
    for (size_t i = 0; i < storage.holders.size(); ++i)
      if (!machines_.holds_slices(rank_, storage.holders[i])) {
        // Neighbours may have moved by kSlack, and write there.
        const ByteRange slice = storage.slice(i);
        if (slice.bytes() > 2 * kSlack) memory_.release(at + slice.begin + kSlack, slice.bytes() - 2 * kSlack);
      }
  memory_.release(at + common_capacity_, StateMemory::kCommonBytes - common_capacity_);
}

}  // namespace lockstep
