#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

namespace lockstep::bench {

/// The most memory this process held while it lived, looked at every few milliseconds: pages of its own, and of shared
/// memory its part (a page that k processes map counts 1/k). Files, such as libraries, do not count. Not to be used
/// while anything is timed.
class PeakMemory {
 public:
  PeakMemory() : thread_([this] { watch(); }) {}
  ~PeakMemory() { stop(); }
  /// Ends the watch. MiB.
  double stop();

 private:
  void watch();

  std::atomic<bool> stop_{false};
  int64_t peak_kib_ = 0;  ///< the thread's, until it is joined
  std::thread thread_;
};

}  // namespace lockstep::bench
