#pragma once

#include <cstddef>
#include <map>
#include <memory>

#include "base/mutex.h"
#include "base/shared_segment.h"

namespace lockstep::shm {

/// Allocates memory in a rank's own resident area: buffers there are reduced in place.
///
/// Not collective: ranks exchange offsets with every operation. Memory is committed when first allocated, and kept for
/// reuse; a failed commit throws Error with both sizes and changes nothing. Any thread may call. A child of fork() has
/// its own copies of the allocated memory, and cannot allocate more.
class Arena {
 public:
  Arena(std::shared_ptr<SharedSegment> segment, size_t begin);

  /// At least 1 byte, page-aligned. Never null.
  std::byte* allocate(size_t bytes);
  /// `memory` came from allocate().
  void free(void* memory);

  /// Whether the whole range lies in this arena.
  bool contains(const void* memory, size_t bytes) const {
    const auto* first = static_cast<const std::byte*>(memory);
    return first >= segment_->data() + begin_ && first + bytes <= segment_->data() + segment_->size();
  }
  size_t offset(const void* memory) const {
    return static_cast<size_t>(static_cast<const std::byte*>(memory) - (segment_->data() + begin_));
  }

 private:
  const std::shared_ptr<SharedSegment> segment_;
  const size_t begin_;
  const unsigned fork_generation_;
  Mutex mutex_;
  std::map<size_t, size_t> free_ LOCKSTEP_GUARDED_BY(mutex_);  // offset -> bytes, never adjacent
  std::map<size_t, size_t> used_ LOCKSTEP_GUARDED_BY(mutex_);
  size_t end_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  // everything below is free or used
};

}  // namespace lockstep::shm
