#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace lockstep {

/// Large blocks of memory, kept for the next that wants the size: a training takes the same sizes in every step, and
/// what the kernel gives anew costs a fault a page.
///
/// Sizes are rounded up to eighths of a power of two and never split or joined, so a block never ends up as a hole that
/// is a little too small, which is what kept memory costs in a heap. What is in use and what is kept are together at
/// most half more than the most that was in use at once. Any thread may use it.
class BlockCache {
 public:
  static constexpr size_t kSmallest = size_t{1} << 20;  ///< below this a heap does as well

  struct Sizes {
    size_t in_use = 0, most_in_use = 0, kept = 0;  ///< bytes, rounded up
  };

  /// At least `bytes`, which are kSmallest or more, from the start of a page, with any content. nullptr: the system has
  /// no more, and nothing is kept either.
  void* take(size_t bytes);
  /// `block` was taken here and not given back.
  bool owns(const void* block) const;
  void give_back(void* block);

  /// A step is over. What nobody has taken for three of them goes back to the kernel. A program that stops to train and
  /// only evaluates says nothing: twice as many blocks taken as in a step count as one.
  void end_step();

  /// False: what is kept goes back to the kernel now, and what is given back later at once. True as it is made.
  void keep(bool on);

  Sizes sizes() const;

  /// Around fork(): no other thread holds the lock then.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Kept {
    void* block;
    uint64_t step;  ///< in which it was given back
  };
  using KeptBySize = std::map<size_t, std::vector<Kept>>;  ///< of each the oldest first

  void* map_anew(size_t bytes);
  void advance();
  bool drop_oldest();
  void drop(KeptBySize::iterator size, size_t count);

  mutable std::mutex mutex_;
  // Guarded by mutex_:
  std::unordered_map<const void*, size_t> taken_;
  KeptBySize kept_;
  Sizes sizes_;
  uint64_t step_ = 0;
  uint64_t taken_in_step_ = 0;
  uint64_t a_steps_ = 0;  ///< blocks taken in a step; 0: none has ended
  bool keeps_ = true;
};

}  // namespace lockstep
