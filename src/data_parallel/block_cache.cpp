#include "data_parallel/block_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>

namespace lockstep {
namespace {

constexpr uint64_t kStepsKept = 3;
/// Allowed in addition to twice a step's blocks, because steps that take few blocks may vary a little.
constexpr uint64_t kFewTaken = 16;
/// A step's blocks until the first step has ended; most steps take fewer.
constexpr uint64_t kUnknown = 1024;

size_t rounded_up(size_t bytes) {
  const size_t unit = std::bit_floor(std::max(bytes, BlockCache::kSmallest)) / 8;  // at least 4 pages
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

void* BlockCache::take(size_t bytes) {
  const size_t size = rounded_up(bytes);
  const MutexLock lock(mutex_);
  if (++taken_in_step_ > 2 * (usual_blocks_ == 0 ? kUnknown : usual_blocks_) + kFewTaken) advance();
  void* block = nullptr;
  if (const auto kept = kept_.find(size); kept != kept_.end()) {
    block = kept->second.back().block;  // the one used last is most likely in the processor's caches
    kept->second.pop_back();
    if (kept->second.empty()) kept_.erase(kept);
    sizes_.kept -= size;
  } else {
    block = map_anew(size);
    if (block == nullptr) return nullptr;
  }
  taken_.emplace(block, size);
  sizes_.in_use += size;
  most_by_step_.front() = std::max(most_by_step_.front(), sizes_.in_use);
  sizes_.most_in_use = std::max(sizes_.most_in_use, sizes_.in_use);
  return block;
}

bool BlockCache::owns(const void* block) const {
  const MutexLock lock(mutex_);
  return taken_.contains(block);
}

void BlockCache::give_back(void* block) {
  const MutexLock lock(mutex_);
  const auto taken = taken_.find(block);
  const size_t size = taken->second;
  taken_.erase(taken);
  sizes_.in_use -= size;
  if (!keeps_) {
    ::munmap(block, size);
    return;
  }
  sizes_.kept += size;
  kept_[size].push_back({block, step_});
}

void BlockCache::end_step() {
  const MutexLock lock(mutex_);
  // Steps vary: a backward that only accumulates takes fewer blocks. The largest of the recent ones counts.
  usual_blocks_ = std::max(taken_in_step_, usual_blocks_ - usual_blocks_ / 8);
  advance();
}

void BlockCache::release() {
  const MutexLock lock(mutex_);
  while (drop_oldest()) continue;
  most_by_step_ = {sizes_.in_use};
  sizes_.most_in_use = sizes_.in_use;
}

void BlockCache::keep(bool on) {
  {
    const MutexLock lock(mutex_);
    keeps_ = on;
  }
  if (!on) release();
}

void BlockCache::tight(bool on) {
  const MutexLock lock(mutex_);
  tight_ = on;
}

void BlockCache::advance() {
  taken_in_step_ = 0;
  ++step_;
  std::copy_backward(most_by_step_.begin(), most_by_step_.end() - 1, most_by_step_.end());
  most_by_step_.front() = sizes_.in_use;
  if (tight_) sizes_.most_in_use = *std::max_element(most_by_step_.begin(), most_by_step_.end());
  for (auto size = kept_.begin(); size != kept_.end();) {
    const auto next = std::next(size);
    const auto stale = [now = step_](const Kept& kept) { return kept.step + kStepsKept < now; };
    const auto fresh = std::find_if_not(size->second.begin(), size->second.end(), stale);
    drop(size, static_cast<size_t>(fresh - size->second.begin()));
    size = next;
  }
  if (tight_) drop_beyond(sizes_.most_in_use, /*coming=*/0);
}

BlockCache::Sizes BlockCache::sizes() const {
  const MutexLock lock(mutex_);
  return sizes_;
}

void* BlockCache::map_anew(size_t bytes) {
  drop_beyond(std::max(sizes_.most_in_use, sizes_.in_use + bytes), bytes);
  for (;;) {
    void* block = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block != MAP_FAILED) return block;
    if (!drop_oldest()) return nullptr;
  }
}

void BlockCache::drop_beyond(size_t most_in_use, size_t coming) {
  const size_t most = most_in_use + most_in_use / (tight_ ? 8 : 2);
  while (sizes_.in_use + coming + sizes_.kept > most && drop_oldest()) continue;
}

bool BlockCache::drop_oldest() {
  const auto oldest = std::min_element(kept_.begin(), kept_.end(), [](const auto& a, const auto& b) {
    return a.second.front().step < b.second.front().step;
  });
  if (oldest == kept_.end()) return false;
  drop(oldest, 1);
  return true;
}

void BlockCache::drop(KeptBySize::iterator size, size_t count) {
  auto& blocks = size->second;
  for (size_t i = 0; i < count; ++i) ::munmap(blocks[i].block, size->first);
  sizes_.kept -= count * size->first;
  blocks.erase(blocks.begin(), blocks.begin() + static_cast<ptrdiff_t>(count));
  if (blocks.empty()) kept_.erase(size);
}

}  // namespace lockstep
