#pragma once

#include <cstdint>
#include <string>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// Why a group ended for good. One word in shared memory, set once: every rank reads the same one, and composes the
/// same text from what the ranks concerned left in their segments.
struct Verdict {
  enum class Cause : uint8_t {
    kNone,
    kDied,           ///< the culprit's process ended without leaving the group
    kLeft,           ///< the culprit left properly while the reporter still waited for it
    kMismatch,       ///< reporter and culprit called different operations with the same number
    kSplits,         ///< their counts of an all_to_all do not match
    kMessage,        ///< the culprit sent a message of another type or size than the reporter receives
    kTimeout,        ///< the reporter's wait timed out
    kAborted,        ///< the reporter's caller aborted the group
    kStuck,          ///< ranks, the reporter among them, wait for each other's messages
    kStuckInGroups,  ///< they wait for each other in different groups
  };
  Cause cause = Cause::kNone;
  int reporter = 0;
  int culprit = 0;
  uint64_t sequence = 0;  ///< of the reporter's operation; 0: a send or receive
  uint64_t message = 0;   ///< the send or receive as Message::described(); 0: not known
  uint64_t message_tag = 0;

  /// Everything but the last three, which the reporter leaves in its control block.
  uint64_t pack() const;
  static Verdict unpack(uint64_t word, const World& world);

  /// Makes this the group's verdict unless it has one, and wakes all ranks. Returns the group's verdict.
  Verdict declare(const World& world) const;
  /// Acquires, from declare(), what it says: `stopped_at`, `missing` and `abort_text` of its reporter.
  static bool exists(const World& world) { return world.verdict().load(std::memory_order_acquire) != 0; }
  static Verdict current(const World& world) { return unpack(world.verdict().load(std::memory_order_acquire), world); }

  /// One sentence or two, naming ranks and operations.
  std::string text(const World& world) const;
  /// Tells the launcher, on this rank's page, that this rank cannot go on and which rank is to blame.
  void note(const World& world, const std::string& said) const;
};

/// "operation 12, all_reduce(float32, 1024 elements, sum)" as `rank` announced it.
std::string announced(const World& world, int rank, uint64_t sequence);

}  // namespace lockstep::shm
