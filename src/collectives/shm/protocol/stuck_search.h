#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// A rank's statement to the others while the only thread that calls its group waits. Ranks are those of the group;
/// sets of them are bits.
struct Waiting {
  enum class Kind : uint8_t { kNothing, kCollective, kSend, kReceive };
  Kind kind = Kind::kNothing;
  int peer = 0;              ///< of the message; kAnySource
  int64_t tag = 0;           ///< of the message
  uint64_t operation = 0;    ///< kCollective: its number
  uint64_t started = 0;      ///< collectives that it has called
  uint64_t sends_to = 0;     ///< ranks that have not taken all that it has sent them
  uint64_t receives_of = 0;  ///< ranks of which it has called a receive that is not done
  bool has_other = false;    ///< kReceive: a message of `peer` with another tag is here, and no receive for it
  int64_t other_tag = 0;
  bool operator==(const Waiting&) const = default;

  using Words = std::array<uint64_t, WaitNote::kWords>;
  Words pack() const;
  static Waiting unpack(const Words& words);
};

/// Finds ranks that wait for each other's messages: each of them waits for something that another one would have to
/// call, and that one's only thread waits, too. What the ranks say of themselves stands in their control blocks, behind
/// a serial number that is odd while it changes. Guarded by the group's mutex.
class StuckSearch {
 public:
  explicit StuckSearch(const World& world)
      : world_(world), serial_(world.mine().waiting.serial.load(std::memory_order_relaxed)) {}

  /// The thread that calls is one that uses the group. What one of several waits for says nothing about the others.
  void note_caller();
  void expect_several_callers() { several_callers_ = true; }
  bool has_several_callers() const { return several_callers_; }

  /// This rank waits. To be called now and then, and withdrawn when the wait is over.
  void publish(const Waiting& now);
  bool is_published() const { return own_.kind != Waiting::Kind::kNothing; }
  void withdraw() { write({}); }

  /// Whether this rank is one of several that have waited for each other for a while, one of them for a message.
  bool finds_ranks();
  /// One that this rank waits for, and what each of them waits for, as finds_ranks() saw it.
  int culprit() const { return culprit_; }
  std::string text() const;

 private:
  struct Seen {
    uint64_t serial = 0;
    Waiting waiting;
  };
  void write(const Waiting& now);
  Seen read(int rank) const;
  std::string text_of(int rank, const Waiting& waiting) const;

  const World& world_;
  const void* caller_ = nullptr;  ///< an address that only the first thread that called has
  bool several_callers_ = false;
  uint64_t serial_;
  Waiting own_;
  Clock::time_point since_;  ///< own_ is as it is
  std::vector<Seen> stuck_;  ///< by rank; serial 0: not stuck
  Clock::time_point stuck_since_;
  int culprit_ = 0;
};

}  // namespace lockstep::shm
