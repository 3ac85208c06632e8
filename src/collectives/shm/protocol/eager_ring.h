#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

/// Allocates the places in a rank's eager area for the data of its next small operations. Ranges are allocated in order
/// and freed when every rank has finished the operation, or this one where the others are done with them by then. The
/// lowest free place is preferred, so that blocking calls use one or two ranges, which stay in the cache.
class EagerRing {
 public:
  explicit EagerRing(size_t bytes) : bytes_(bytes) {}

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
      if (wrapped ? end + wanted <= oldest : wanted <= oldest)
        begin = wrapped ? end : 0;
      else if (!wrapped && end + wanted <= bytes_)
        begin = end;
      else
        return std::nullopt;
    } else if (wanted > bytes_) {
      return std::nullopt;
    }
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
  std::deque<Range> live_;
};

}  // namespace lockstep::shm
