#pragma once

#include <cstddef>
#include <map>

#include "base/shared_segment.h"

namespace lockstep::shm {

/// What of another rank's resident memory this process has in its page table. A rank writes to its slice of every
/// buffer only, and everything else of N ranks' memory would cost each of them N times 2 MiB of page table for 1 GiB.
///
/// Pages are entered in ranges, which is faster than one fault for each that is written. Under the group's mutex.
class Reach {
 public:
  /// Enters the pages of [begin, end) of `segment` that are not entered yet; all were committed by their owner.
  void enter(SharedSegment& segment, size_t begin, size_t end);

 private:
  std::map<size_t, size_t> ranges_;  // begin -> end, whole pages, never adjacent
  size_t last_begin_ = 0;            // the range that was used last
  size_t last_end_ = 0;
};

}  // namespace lockstep::shm
