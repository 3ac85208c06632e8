#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace lockstep::faultbox {

/// Where in its life a rank is.
enum class Place : uint32_t {
  kNone,
  kStart,
  kRendezvous,
  kForward,
  kBucket,
  kOptimizer,
  kSave,
  kExit,
  kEnd,
};
constexpr std::array<const char*, 9> kPlaceNames = {"none",      "start", "rendezvous", "forward", "bucket",
                                                    "optimizer", "save",  "exit",       "end"};

/// What the ranks tell the driver, in a file that all of them map: readable when they are dead. It is the driver's
/// own knowledge of the truth, independent of what the launcher shares with its ranks.
struct FaultPage {
  static constexpr int kMostRanks = 16;
  struct Rank {
    std::atomic<pid_t> pid;
    std::atomic<Place> place;
    std::atomic<int64_t> step;
    std::atomic<int64_t> fault_ns;  ///< CLOCK_MONOTONIC at which its fault happens; 0: none has been armed
  };
  Rank ranks[kMostRanks];
  std::atomic<int64_t> resumed_step;  ///< of the checkpoint that the run went on from, plus one
};

}  // namespace lockstep::faultbox
