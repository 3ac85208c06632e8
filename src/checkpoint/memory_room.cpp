#include "checkpoint/memory_room.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/error.h"
#include "base/shared_segment.h"
#include "base/state_memory.h"

namespace lockstep {
namespace {

std::string in_mebibytes(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

/// Room for pickles that grow with the numbers in them.
uint64_t with_room(uint64_t bytes) { return (bytes + bytes / 64 + (64 << 10)) / 4096 * 4096; }

}  // namespace

void MemoryRoom::ask(CheckpointMessage& message, uint64_t common_bytes, uint64_t own_bytes) const {
  message.text = std::to_string(common_bytes);
  message.state = std::to_string(own_bytes);
  message.steps = static_cast<int64_t>(available_memory_bytes() + memory_.committed_bytes());
}

void MemoryRoom::check(const std::vector<CheckpointMessage>& ranks) {
  uint64_t wanted = 0;
  for (const CheckpointMessage& rank : ranks) {
    const auto common = std::strtoull(rank.text.c_str(), nullptr, 10);
    wanted = std::max<uint64_t>(wanted, 2 * with_room(common));
  }
  auto available = static_cast<uint64_t>(ranks[0].steps);  // on the machine that has least
  for (const CheckpointMessage& rank : ranks) {
    wanted += 2 * with_room(std::strtoull(rank.state.c_str(), nullptr, 10));
    available = std::min(available, static_cast<uint64_t>(rank.steps));
  }
  if (wanted > available)
    throw LimitError("two states in memory take " + in_mebibytes(wanted) + ", but only " + in_mebibytes(available) +
                     " are available");
}

void MemoryRoom::open(uint64_t common_bytes, uint64_t own_bytes) {
  constexpr uint64_t kLine = 64;
  const auto rank = static_cast<uint64_t>(rank_here_), ranks = static_cast<uint64_t>(ranks_here_);
  common_capacity_ = with_room(common_bytes);
  const auto bound = [&](uint64_t of) {
    return of == ranks ? common_capacity_ : common_bytes * of / ranks / kLine * kLine;
  };
  begin_ = bound(rank);
  end_ = bound(rank + 1);
  memory_.open_window(MappedSlots::kCommon0, StateMemory::common_at(0) + begin_, end_ - begin_);
  memory_.open_window(MappedSlots::kCommon1, StateMemory::common_at(1) + begin_, end_ - begin_);
  open_own(own_bytes);
}

void MemoryRoom::open_own(uint64_t own_bytes) {
  if (own_bytes > StateMemory::kOwnBytes)
    throw LimitError("what rank " + std::to_string(rank_) + " has of its own takes " + in_mebibytes(own_bytes) +
                     ", and there are addresses for " + in_mebibytes(StateMemory::kOwnBytes));
  own_capacity_ = std::min(with_room(own_bytes), StateMemory::kOwnBytes);
  memory_.open_window(MappedSlots::kOwn0, StateMemory::own_at(0, rank_), own_capacity_);
  memory_.open_window(MappedSlots::kOwn1, StateMemory::own_at(1, rank_), own_capacity_);
}

}  // namespace lockstep
