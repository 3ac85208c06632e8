#include "data_parallel/tensor_memory.h"

#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include <c10/core/CPUAllocator.h>

#include "data_parallel/block_cache.h"
#include "data_parallel/heap.h"

namespace lockstep {
namespace {

/// Of the whole process. Never freed: tensors may be freed after main().
struct Kept {
  BlockCache cache;
  std::atomic<bool> on{false};  ///< tensors get blocks of the cache

  std::mutex mutex;
  // Guarded by mutex:
  std::vector<TensorMemory*> owners;
  uint64_t steps = 0;  ///< of all owners together
  bool heap = false;   ///< malloc keeps what is freed
};

Kept& kept() {
  static Kept* all = new Kept;
  return *all;
}

class KeepingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const bool large = bytes >= BlockCache::kSmallest && kept().on.load(std::memory_order_relaxed);
    void* block = large ? kept().cache.take(bytes) : nullptr;
    // Of what the system has not got, LibTorch's own says so.
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

/// Puts it in the place of LibTorch's own, for good: what it has given out may be freed at any time. False: there is
/// the user's.
bool install() {
  static KeepingAllocator* const allocator = new KeepingAllocator;
  if (c10::GetCPUAllocator() == allocator) return true;
  if (c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return false;
  static std::once_flag once;
  std::call_once(once, [] {
    ::pthread_atfork([] { kept().mutex.lock(), kept().cache.lock(); },
                     [] { kept().cache.unlock(), kept().mutex.unlock(); },
                     [] { kept().cache.unlock(), kept().mutex.unlock(); });
  });
  c10::SetCPUAllocator(allocator);
  return true;
}

/// An owner that has not stepped while all together stepped so often no longer holds up the others' steps: it rests.
constexpr uint64_t kRests = 64;

}  // namespace

TensorMemory::TensorMemory(bool keep) : keeps_(keep) {
  if (!keeps_) return;
  Kept& all = kept();
  std::lock_guard lock(all.mutex);
  last_ = all.steps;
  all.owners.push_back(this);
  if (all.owners.size() > 1) return;
  all.heap = keep_freed_memory();
  if (!all.heap || !install()) return;
  all.cache.keep(true);
  all.on = true;
  // Holes that large tensors have left behind there are too large for what the heap will hold from now on.
  ::malloc_trim(0);
}

TensorMemory::~TensorMemory() {
  if (!keeps_) return;
  Kept& all = kept();
  std::lock_guard lock(all.mutex);
  std::erase(all.owners, this);
  if (!all.owners.empty()) return;
  all.on = false;
  all.cache.keep(false);
  if (all.heap) release_freed_memory();
  all.heap = false;
}

void TensorMemory::end_step() {
  if (!keeps_) return;
  Kept& all = kept();
  std::lock_guard lock(all.mutex);
  last_ = ++all.steps;
  stepped_ = true;
  const auto waits = [&](const TensorMemory* owner) { return !owner->stepped_ && owner->last_ + kRests > all.steps; };
  if (std::any_of(all.owners.begin(), all.owners.end(), waits)) return;
  for (TensorMemory* owner : all.owners) owner->stepped_ = false;
  all.cache.end_step();
}

}  // namespace lockstep
