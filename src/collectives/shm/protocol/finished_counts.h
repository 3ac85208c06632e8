#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// How many collectives each rank has finished, as far as this one knows. Guarded by the communicator's mutex.
class FinishedCounts {
 public:
  explicit FinishedCounts(const World& world) : world_(world), own_(world.mine().finished.load()) { by_.fill(own_); }

  uint64_t own() const { return own_; }
  void set_own(uint64_t finished) { own_ = by_[static_cast<size_t>(world_.rank())] = finished; }
  /// Records that rank's announcement that it has finished this many operations or more.
  void note(int rank, uint64_t finished) {
    uint64_t& known = by_[static_cast<size_t>(rank)];
    known = std::max(known, finished);
  }

  /// The number that all ranks have finished.
  uint64_t least() const { return *std::min_element(by_.begin(), by_.begin() + world_.size()); }

  /// Whether every rank has finished so many. Asks those of which it is not known, and adds to `blocked_on` those that
  /// have not.
  bool everyone(uint64_t finished, uint64_t& blocked_on) {
    bool all = own_ >= finished;
    for (int r = 0; r < world_.size(); ++r) {
      uint64_t& known = by_[static_cast<size_t>(r)];
      if (r == world_.rank() || known >= finished) continue;
      known = world_.control(r).finished.load(std::memory_order_acquire);  // from finish(): its reads are over
      if (known >= finished) continue;
      blocked_on |= world_.bit(r);
      all = false;
    }
    return all;
  }

 private:
  const World& world_;
  uint64_t own_;
  std::array<uint64_t, kMaxRanks> by_{};
};

}  // namespace lockstep::shm
