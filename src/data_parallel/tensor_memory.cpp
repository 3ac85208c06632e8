#include "data_parallel/tensor_memory.h"

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include <c10/core/CPUAllocator.h>

#include <lockstep/kept_memory.h>

#include "base/mutex.h"
#include "data_parallel/block_cache.h"
#include "data_parallel/heap.h"

namespace lockstep {
namespace {

/// Of the whole process. Never destroyed, because tensors may be freed after main().
struct Kept {
  BlockCache cache;
  /// Tensors of this many bytes and more get blocks of the cache.
  std::atomic<size_t> from{SIZE_MAX};

  struct Owner {
    const TensorMemory* memory;
    bool tight;
    uint64_t last = 0;     ///< the owner's last step, as counted in `steps`
    bool stepped = false;  ///< has stepped since all owners last had
  };
  Mutex mutex;
  std::vector<Owner> owners LOCKSTEP_GUARDED_BY(mutex);
  uint64_t steps LOCKSTEP_GUARDED_BY(mutex) = 0;  ///< of all owners together
  bool heap LOCKSTEP_GUARDED_BY(mutex) = false;   ///< malloc keeps freed memory

  void follow_owners() LOCKSTEP_REQUIRES(mutex) {
    const bool tight = std::any_of(owners.begin(), owners.end(), [](const Owner& owner) { return owner.tight; });
    cache.tight(tight);
    from = tight ? BlockCache::kSmallest : BlockCache::kSmallestForSpeed;
  }
};

Kept& kept() {
  static Kept* all = new Kept;
  return *all;
}

// Called around fork(), so that no other thread holds a lock in the child. Not analysed: each function leaves locks
// held or free for the other.
void lock_all() LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
  kept().mutex.lock();
  kept().cache.lock();
}
void unlock_all() LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
  kept().cache.unlock();
  kept().mutex.unlock();
}

class KeepingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const bool large = bytes >= kept().from.load(std::memory_order_relaxed);
    void* block = large ? kept().cache.take(bytes) : nullptr;
    // If there is no memory, LibTorch's allocator reports it.
    if (block == nullptr) return c10::GetDefaultCPUAllocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_any; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

 private:
  static void free_block(void* block) {
    c10::profiledCPUMemoryReporter().Delete(block);
    kept().cache.give_back(block);
  }
  static void free_any(void* memory) {
    if (kept().cache.owns(memory))
      free_block(memory);
    else
      c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
  }
};

/// Replaces LibTorch's own allocator permanently, because its tensors may be freed at any time. Returns false if the
/// user has installed another.
bool install() {
  static KeepingAllocator* const allocator = new KeepingAllocator;
  if (c10::GetCPUAllocator() == allocator) return true;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return false;
  static std::once_flag once;
  std::call_once(once, [] { ::pthread_atfork(lock_all, unlock_all, unlock_all); });
  c10::SetCPUAllocator(allocator);
  return true;
}

/// An owner that has not stepped during this many steps of all owners is idle, and the others no longer wait for it.
constexpr uint64_t kIdleAfter = 64;

}  // namespace

TensorMemory::TensorMemory(bool keep, bool tight) : keeps_(keep), tight_(tight) {
  if (!keeps_) return;
  Kept& all = kept();
  const MutexLock lock(all.mutex);
  all.owners.push_back({.memory = this, .tight = tight_, .last = all.steps});
  if (all.owners.size() > 1) {
    if (all.from != SIZE_MAX) all.follow_owners();
    return;
  }
  all.heap = keep_freed_memory();
  if (!all.heap || !install()) return;
  all.cache.keep(true);
  all.follow_owners();
  // Large tensors have left holes in the heap that nothing allocated later would fill.
  ::malloc_trim(0);
}

TensorMemory::~TensorMemory() {
  if (!keeps_) return;
  Kept& all = kept();
  const MutexLock lock(all.mutex);
  std::erase_if(all.owners, [this](const Kept::Owner& owner) { return owner.memory == this; });
  if (!all.owners.empty()) {
    if (all.from != SIZE_MAX) all.follow_owners();
    return;
  }
  all.from = SIZE_MAX;
  all.cache.keep(false);
  if (all.heap) release_freed_memory();
  all.heap = false;
}

void TensorMemory::end_step() {
  if (!keeps_) return;
  Kept& all = kept();
  const MutexLock lock(all.mutex);
  ++all.steps;
  bool complete = true;
  for (Kept::Owner& owner : all.owners) {
    if (owner.memory == this) owner = {.memory = this, .tight = tight_, .last = all.steps, .stepped = true};
    complete = complete && (owner.stepped || owner.last + kIdleAfter <= all.steps);
  }
  if (!complete) return;
  for (Kept::Owner& owner : all.owners) owner.stepped = false;
  all.cache.end_step();
}

void TensorMemory::release() {
  Kept& all = kept();
  const MutexLock lock(all.mutex);
  if (all.from != SIZE_MAX) all.cache.release();
  if (all.heap) ::malloc_trim(0);
}

KeptMemory::KeptMemory() : memory_(std::make_unique<TensorMemory>(/*keep=*/true)) {}
KeptMemory::~KeptMemory() = default;
KeptMemory::KeptMemory(KeptMemory&&) noexcept = default;
KeptMemory& KeptMemory::operator=(KeptMemory&&) noexcept = default;

void KeptMemory::end_step() {
  if (memory_) memory_->end_step();
}

}  // namespace lockstep
