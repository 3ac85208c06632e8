#include "data_parallel/tensor_memory.h"

#include <malloc.h>
#include <pthread.h>

#include <mutex>

#include <c10/core/CPUAllocator.h>

#include "base/block_cache.h"
#include "base/heap.h"

namespace lockstep {
namespace {

/// Never freed: tensors may be freed after main().
BlockCache& cache() {
  static BlockCache* blocks = new BlockCache;
  return *blocks;
}

class KeepingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < BlockCache::kSmallest ? nullptr : cache().take(bytes);
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
    cache().give_back(block);
  }
  static void free_any(void* memory) {
    if (cache().owns(memory))
      free_block(memory);
    else
      c10::GetDefaultCPUAllocator()->raw_deleter()(memory);
  }
};

}  // namespace

void keep_tensor_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    if (!keep_freed_memory() || c10::GetCPUAllocator() != c10::GetDefaultCPUAllocator()) return;
    ::pthread_atfork([] { cache().lock(); }, [] { cache().unlock(); }, [] { cache().unlock(); });
    static KeepingAllocator* const allocator = new KeepingAllocator;
    c10::SetCPUAllocator(allocator);
    // Holes that large tensors have left behind there are too large for what the heap will hold from now on.
    ::malloc_trim(0);
  });
}

void end_step_of_tensor_memory() { cache().end_step(); }

}  // namespace lockstep
