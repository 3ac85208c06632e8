#pragma once

#include <cstddef>
#include <map>

#include "base/shared_segment.h"

namespace lockstep::shm {

/// The ranges of another rank's resident memory in this process's page table. A rank writes only to its slice of every
/// buffer; mapping all of N ranks' memory would cost each of them N times 2 MiB of page table for 1 GiB.
///
/// Whole ranges are populated, which is faster than one fault for each page.
class PopulatedRanges {
 public:
  /// Populates the pages of [begin, end) of `segment` that are not populated yet.
  /// REQUIRES: their owner has committed all of them.
  void populate(SharedSegment& segment, size_t begin, size_t end);

 private:
  std::map<size_t, size_t> ranges_;  // begin -> end, whole pages, never adjacent
  size_t last_begin_ = 0;            // the last range that was used
  size_t last_end_ = 0;
};

}  // namespace lockstep::shm
