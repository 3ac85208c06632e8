#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "base/mutex.h"

namespace lockstep {

/// Keeps large blocks of memory for the next request of the same size: training allocates the same sizes in every step,
/// and fresh memory from the kernel costs a page fault for every page.
///
/// Sizes are rounded up to eighths of a power of two. Blocks are never split or joined, so none becomes a hole that is
/// slightly too small, as in a heap that keeps memory. Memory in use and kept memory add up to at most 1.5 times the
/// largest amount ever in use at once or, if it is tight(), to 1.125 times the largest amount in the last steps. Any
/// thread may use it.
class BlockCache {
 public:
  static constexpr size_t kSmallest = size_t{1} << 17;  ///< below this size a heap has few holes
  /// Below this size a heap is as fast.
  static constexpr size_t kSmallestForSpeed = size_t{1} << 20;

  struct Sizes {
    size_t in_use = 0;       ///< bytes, rounded up
    size_t most_in_use = 0;  ///< ever or, if it is tight(), in this step and the three before
    size_t kept = 0;
  };

  /// At least `bytes` (kSmallest or more), page-aligned, with undefined content. nullptr if neither the system nor the
  /// cache has memory left.
  void* take(size_t bytes);
  /// Whether `block` was taken here and has not been given back.
  bool owns(const void* block) const;
  void give_back(void* block);

  /// Ends a step. Blocks unused for three steps are returned to the kernel. A program that only evaluates no longer
  /// calls this; then a step ends whenever twice a step's number of blocks has been taken.
  void end_step();

  /// Returns kept memory to the kernel now.
  void release();
  /// False: release(), and return every block from now on. A new cache keeps.
  void keep(bool on);
  /// True: keeps less, so that blocks of sizes that are in use at different times take each other's memory. Costs
  /// faults.
  void tight(bool on);

  Sizes sizes() const;

  /// Called around fork(), so that no other thread holds the lock in the child.
  void lock() LOCKSTEP_ACQUIRE(mutex_) { mutex_.lock(); }
  void unlock() LOCKSTEP_RELEASE(mutex_) { mutex_.unlock(); }

 private:
  struct Kept {
    void* block;
    uint64_t step;  ///< in which it was given back
  };
  using KeptBySize = std::map<size_t, std::vector<Kept>>;  ///< each with the oldest first

  void* map_anew(size_t bytes) LOCKSTEP_REQUIRES(mutex_);
  void advance() LOCKSTEP_REQUIRES(mutex_);
  /// Keeps no more than it may if this much is the most that was in use.
  void drop_beyond(size_t most_in_use, size_t coming) LOCKSTEP_REQUIRES(mutex_);
  bool drop_oldest() LOCKSTEP_REQUIRES(mutex_);
  void drop(KeptBySize::iterator size, size_t count) LOCKSTEP_REQUIRES(mutex_);

  mutable Mutex mutex_;
  std::unordered_map<const void*, size_t> taken_ LOCKSTEP_GUARDED_BY(mutex_);
  KeptBySize kept_ LOCKSTEP_GUARDED_BY(mutex_);
  Sizes sizes_ LOCKSTEP_GUARDED_BY(mutex_);
  uint64_t step_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t taken_in_step_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t usual_blocks_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  ///< taken in a step; 0: no step has ended yet
  /// most_in_use of this step, the one before, ...
  std::array<size_t, 4> most_by_step_ LOCKSTEP_GUARDED_BY(mutex_){};
  bool keeps_ LOCKSTEP_GUARDED_BY(mutex_) = true;
  bool tight_ LOCKSTEP_GUARDED_BY(mutex_) = false;
};

}  // namespace lockstep
