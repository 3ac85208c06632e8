#include "collectives/shm/segment/populated_ranges.h"

#include <algorithm>
#include <iterator>

#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

void PopulatedRanges::populate(SharedSegment& segment, size_t begin, size_t end) {
  if (begin >= end || (begin >= last_begin_ && end <= last_end_)) return;
  constexpr size_t kPage = 4096;
  begin = begin / kPage * kPage;
  end = Geometry::round_up(end, kPage);
  auto range = ranges_.upper_bound(begin);
  if (range != ranges_.begin() && std::prev(range)->second >= begin) --range;
  size_t at = begin;
  last_begin_ = begin;
  last_end_ = end;
  while (range != ranges_.end() && range->first <= end) {
    if (at < range->first) segment.populate(at, range->first);
    at = std::max(at, range->second);
    last_begin_ = std::min(last_begin_, range->first);
    last_end_ = std::max(last_end_, range->second);
    range = ranges_.erase(range);
  }
  if (at < end) segment.populate(at, end);
  ranges_.emplace(last_begin_, last_end_);
}

}  // namespace lockstep::shm
