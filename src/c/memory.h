#pragma once

#include <cstddef>
#include <map>
#include <optional>

#include "base/mutex.h"

namespace lockstep::c {

/// The memory that a group has allocated and not freed, as seen by this process. Any thread may call.
class HandedOut {
 public:
  enum class Kind { kOwn, kTogether };  ///< of this rank; of all ranks, in the memory of rank 0

  void add(void* memory, size_t bytes, Kind kind);
  /// `memory` may be any address, not only one passed to add().
  void remove(void* memory);
  /// The kind of the memory that begins here.
  std::optional<Kind> kind_of(const void* memory) const;
  /// The kind of the memory that holds all of these bytes; none if no single block does.
  std::optional<Kind> holder_of(const void* begin, size_t bytes) const;

 private:
  struct Block {
    size_t bytes;
    Kind kind;
  };
  mutable Mutex mutex_;
  std::map<const std::byte*, Block> blocks_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::c
