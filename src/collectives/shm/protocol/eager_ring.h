#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

/// Allocates places for the data of a rank's next small operations. Ranges are allocated in order and freed when every
/// rank has finished the operation, or this one where the others are done with them by then.
class EagerRing {
 public:
  enum class Prefer {
    kLowest,  ///< blocking calls use one or two ranges, which stay in the caches
    kNext,    ///< a range is used again after all others, when it has left the caches of those who have read it
  };
  EagerRing(size_t bytes, Prefer prefer) : bytes_(bytes), prefer_(prefer) {}

  /// Every rank has finished the operations up to the first of these, this rank those up to the second.
  void release(uint64_t finished, uint64_t finished_here) {
    while (!live_.empty() && live_.front().sequence <= (live_.front().until_here ? finished_here : finished))
      live_.pop_front();
  }

  /// `until_here`: nobody else uses the range once this rank has finished the operation.
  std::optional<size_t> allocate(uint64_t sequence, size_t wanted, bool until_here) {
    wanted = Geometry::round_up(wanted, kCacheLine);
    size_t begin = 0;
    if (!live_.empty()) {
      const size_t oldest = live_.front().begin, end = live_.back().end;
      const bool wrapped = live_.back().begin < oldest;
      const bool fits_behind = end + wanted <= (wrapped ? oldest : bytes_), fits_first = !wrapped && wanted <= oldest;
      if (!fits_behind && !fits_first) return std::nullopt;
      begin = fits_behind && !(fits_first && prefer_ == Prefer::kLowest) ? end : 0;
    } else if (wanted > bytes_) {
      return std::nullopt;
    } else if (prefer_ == Prefer::kNext && end_ + wanted <= bytes_) {
      begin = end_;
    }
    end_ = begin + wanted;
    live_.push_back({sequence, begin, begin + wanted, until_here});
    return begin;
  }

 private:
  struct Range {
    uint64_t sequence;
    size_t begin, end;
    bool until_here;
  };
  size_t bytes_;
  Prefer prefer_;
  size_t end_ = 0;  ///< of the last range
  std::deque<Range> live_;
};

}  // namespace lockstep::shm
