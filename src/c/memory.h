#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "base/mutex.h"

namespace lockstep::c {

/// A part of the caller's memory.
struct MemoryRange {
  const void* begin = nullptr;
  size_t bytes = 0;

  /// Whether they have a byte in common.
  bool overlaps(MemoryRange other) const;
};

/// The memory that a group has allocated and not freed, as seen by this process. Any thread may call.
class HandedOut {
 public:
  enum class Kind { kOwn, kTogether };  ///< of this rank; of all ranks, in the memory of rank 0

  void add(void* memory, size_t bytes, Kind kind);
  /// `memory` may be any address, not only one passed to add().
  void remove(void* memory);
  struct Block {
    size_t bytes;
    Kind kind;
  };
  /// The memory that begins here.
  std::optional<Block> block_at(const void* memory) const;
  bool overlaps(MemoryRange range) const;
  /// The kind of the memory that holds all of these bytes; none if no single block does.
  std::optional<Kind> holder_of(const void* begin, size_t bytes) const;

 private:
  mutable Mutex mutex_;
  std::map<const std::byte*, Block> blocks_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::c
