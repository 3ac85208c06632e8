#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
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
  kMemorySave,
  kExit,
  kEnd,
};
constexpr std::array<const char*, 10> kPlaceNames = {"none",      "start", "rendezvous",  "forward", "bucket",
                                                     "optimizer", "save",  "memory_save", "exit",    "end"};

/// What the ranks tell the driver, in a file that all of them map: readable when they are dead. It is the driver's
/// own knowledge of the truth, independent of what the launcher shares with its ranks.
struct FaultPage {
  static constexpr int kMostRanks = 16;
  struct Rank {
    std::atomic<pid_t> pid;
    std::atomic<Place> place;
    std::atomic<int64_t> step;
    std::atomic<int64_t> fault_ns;      ///< CLOCK_MONOTONIC at which its fault happens; 0: none has been armed
    std::atomic<int64_t> die_at_write;  ///< elastic_rank dies before this write of a save to memory, from 1 on; 0: none
  };
  Rank ranks[kMostRanks];
  std::atomic<int64_t> made;          ///< steps, in all starts, as rank 0 counts them
  std::atomic<int64_t> resumed_step;  ///< of the checkpoint that the run went on from, plus one
  std::atomic<int64_t> cut_saves;     ///< ranks that died by their die_at_write
  std::atomic<int64_t> made_before;   ///< `made` when the rank 0 of this start began
  std::atomic<int64_t> kills;         ///< that the driver has done: ranks with kill_steps= wait for each at its step
};

// ddp_rank.py writes it, too.
static_assert(sizeof(FaultPage::Rank) == 32 && offsetof(FaultPage, made) == 16 * 32 &&
              offsetof(FaultPage, made_before) == 16 * 32 + 24 && offsetof(FaultPage, kills) == 16 * 32 + 32);
static_assert(static_cast<int>(Place::kForward) == 3 && static_cast<int>(Place::kEnd) == 9);

}  // namespace lockstep::faultbox
