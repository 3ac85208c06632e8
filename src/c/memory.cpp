#include "c/memory.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "c/guarded.h"

namespace lockstep::c {

bool MemoryRange::overlaps(MemoryRange other) const {
  const auto first = reinterpret_cast<uintptr_t>(begin), second = reinterpret_cast<uintptr_t>(other.begin);
  return bytes > 0 && other.bytes > 0 && first < second + other.bytes && second < first + bytes;
}

void HandedOut::add(void* memory, size_t bytes, Kind kind) {
  const MutexLock lock(mutex_);
  blocks_[static_cast<const std::byte*>(memory)] = {bytes, kind};
}

void HandedOut::remove(void* memory) {
  const MutexLock lock(mutex_);
  blocks_.erase(static_cast<const std::byte*>(memory));
}

std::optional<HandedOut::Block> HandedOut::block_at(const void* memory) const {
  const MutexLock lock(mutex_);
  const auto found = blocks_.find(static_cast<const std::byte*>(memory));
  return found == blocks_.end() ? std::nullopt : std::optional(found->second);
}

bool HandedOut::overlaps(MemoryRange range) const {
  const MutexLock lock(mutex_);
  return std::any_of(blocks_.begin(), blocks_.end(), [&](const auto& one) {
    return range.overlaps({one.first, one.second.bytes});
  });
}

std::optional<HandedOut::Kind> HandedOut::holder_of(const void* begin, size_t bytes) const {
  const MutexLock lock(mutex_);
  auto next = blocks_.upper_bound(static_cast<const std::byte*>(begin));
  if (next == blocks_.begin()) return std::nullopt;
  const auto& [start, block] = *--next;
  const auto before = static_cast<size_t>(static_cast<const std::byte*>(begin) - start);
  if (before > block.bytes || bytes > block.bytes - before) return std::nullopt;
  return block.kind;
}

namespace {

using State = std::shared_ptr<GroupState>;

void check(const char* function, size_t bytes, void** memory) {
  if (memory == nullptr) refuse(function, "memory is null; give the address of a pointer");
  *memory = nullptr;
  if (bytes > size_t{1} << 46) refuse(function, std::to_string(bytes) + " bytes are more than any machine has");
}

/// A rank's statement to the others about memory that they request together.
struct Wanted {
  uint64_t bytes;
  uint64_t place;  ///< on rank 0: its offset there, or kNowhere
};

void require_unused(const char* function, MemoryRange memory) {
  const std::optional<Use> use = pending_use(memory);
  if (!use) return;
  refuse(function, "this memory is used by " + use->text() +
                       ", which is not done; call lockstep_wait() for its request first. Nothing was freed");
}

void* allocate_together(const char* function, const State& state, size_t bytes) {
  shm::Communicator& group = state->group;
  Wanted mine{bytes, shm::kNowhere};
  std::byte* block = nullptr;
  std::string failure = "rank 0 has no memory for " + std::to_string(bytes) + " bytes; see its own text for the reason";
  if (group.rank() == 0) {
    try {
      block = group.allocate(bytes);
      std::memset(block, 0, bytes);
      mine.place = group.arena()->offset(block);
    } catch (const std::exception& error) {
      failure = error.what();
    }
  }
  const std::vector<Wanted> all = all_gather(state, shm::CalledAs::kAllocateTogether, mine);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank].bytes == all[0].bytes) continue;
    if (block != nullptr) group.free(block);
    throw StatusError(LOCKSTEP_MISMATCH, std::string(function) + ": rank " + std::to_string(rank) + " wants " +
                                             std::to_string(all[rank].bytes) + " bytes, and rank 0 " +
                                             std::to_string(all[0].bytes) + "; every rank must ask for the same size");
  }
  if (all[0].place == shm::kNowhere) throw LimitError(std::string(function) + ": " + failure);
  std::byte* memory = group.memory_of(0, all[0].place);
  state->handed_out.add(memory, bytes, HandedOut::Kind::kTogether);
  return memory;
}

/// Returns when all ranks free this memory, or refuses it on all of them.
void free_together(const char* function, const State& state, const void* memory) {
  const uint64_t mine = static_cast<uint64_t>(static_cast<const std::byte*>(memory) - state->group.memory_of(0, 0));
  const std::vector<uint64_t> all = all_gather(state, shm::CalledAs::kFreeTogether, mine);
  for (size_t rank = 1; rank < all.size(); ++rank)
    if (all[rank] != all[0])
      throw StatusError(LOCKSTEP_MISMATCH, std::string(function) + ": rank " + std::to_string(rank) +
                                               " frees other memory than rank 0; every rank must free the same memory "
                                               "of lockstep_allocate_together(). Nothing was freed");
}

}  // namespace
}  // namespace lockstep::c

using namespace lockstep::c;

lockstep_status lockstep_allocate(lockstep_group* group, size_t bytes, void** memory) {
  const char* function = "lockstep_allocate";
  return guarded(nullptr, LOCKSTEP_OUT_OF_RESOURCES, [&] {
    if (group == nullptr) refuse(function, "the group is null");
    if (group->state == nullptr) refuse(function, "this rank has left the group");
    check(function, bytes, memory);
    std::byte* block = group->state->group.allocate(bytes);
    group->state->handed_out.add(block, bytes, HandedOut::Kind::kOwn);
    *memory = block;
  });
}

lockstep_status lockstep_allocate_together(lockstep_group* group, size_t bytes, void** memory) {
  const char* function = "lockstep_allocate_together";
  return guarded(function, group, [&](const State& state) {
    check(function, bytes, memory);
    *memory = allocate_together(function, state, bytes);
  });
}

lockstep_status lockstep_free(lockstep_group* group, void* memory) {
  const char* function = "lockstep_free";
  const bool is_member = group != nullptr && group->state != nullptr;
  const auto block = is_member ? group->state->handed_out.block_at(memory) : std::nullopt;
  if (block && block->kind == HandedOut::Kind::kTogether)
    return guarded(function, group, [&](const State& state) {
      require_unused(function, {memory, block->bytes});
      free_together(function, state, memory);  // no rank uses it any more
      state->handed_out.remove(memory);
      if (state->group.rank() == 0) state->group.free(memory);
    });
  return guarded(function, group, [&](const State& state) {
    if (memory == nullptr) return;
    if (block) require_unused(function, {memory, block->bytes});
    state->handed_out.remove(memory);  // first: from then on another thread may get the memory
    state->group.free(memory);
  });
}
