#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/mutex.h"

namespace lockstep::gloo_engine {

/// A collective, which must be the same on every rank: its number in the group, counted from 1, and its text, such as
/// "all_reduce(float32, 43 elements, sum)". What it is for (OperationLabel) is shown and not compared.
struct Entry {
  uint64_t number;
  std::string text;
  std::string purpose;

  /// The text and the purpose.
  std::string shown() const;
};

/// Records the last collectives of this rank. When one hangs or fails, the ranks exchange their records through the
/// store to find where they differ, as c10d's FlightRecorder does for NCCL. A collective that makes progress costs no
/// message. Used by the calling thread, but for interrupt().
class FlightRecorder {
 public:
  /// To be made before the group is formed: deletes what this rank wrote for an earlier group over the same store.
  FlightRecorder(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), world_size_(world_size) {
    store_->deleteKey(key(rank_));
  }

  /// Of the calling thread, whose label says what the collective is for.
  Entry add(std::string text);
  /// Gloo's tag for the messages of the last collective. It depends on all collectives so far: after one that differs
  /// no messages match any more, so no rank takes the data of one collective for that of another, and a rank that only
  /// sends, and so never waits, is found at its next collective.
  uint32_t tag() const { return static_cast<uint32_t>(count_) << 16 | ((hash_ >> 16 ^ hash_) & 0xffff); }

  /// This rank waits in `entry`: tells the others, and compares their records. Returns what does not match, or "" if no
  /// mismatch is known.
  std::string compare(const Entry& entry);
  /// `entry` has failed on this rank. Tells the others, and waits until all of them have reported their failure or
  /// `timeout` has passed. Returns what does not match, or where each rank is.
  std::string after_failure(const Entry& entry, std::chrono::milliseconds timeout);
  /// after_failure(), behind the engine's own `cause` unless the ranks know better why.
  std::string explain(const std::string& cause, const Entry& entry, std::chrono::milliseconds timeout);

  /// This rank leaves after its last collective: the others are told if they wait in a later one.
  void leave_word();

  /// From any thread: from now on compare() returns `why`.
  void interrupt(const std::string& why);
  /// Empty: nobody has interrupted.
  std::string interruption() const;

 private:
  /// What a rank has reported.
  struct Dump {
    enum class State { kWaits, kFailed, kLeft } state = State::kWaits;
    Entry now{};                ///< the collective it waits in, that failed, or that was its last
    std::deque<Entry> history;  ///< the last collectives, `now` among them

    std::string packed() const;
    static Dump unpacked(const std::string& bytes);
    /// The collective with that number; null if it is not known.
    const Entry* entry(uint64_t number) const;
  };
  /// One for each rank; none where a rank has reported nothing.
  using Dumps = std::vector<std::optional<Dump>>;

  std::string key(int rank) const { return "calls/" + std::to_string(rank); }
  /// Reports what this rank does, and reads the others' reports into `dumps`. False if the store is gone, with the rank
  /// or the launcher that served it: `dumps` then holds what had been read before.
  bool exchange(const Dump& own, Dumps& dumps) const;
  Dump own_dump(const Entry& entry, Dump::State state) const { return {state, entry, history_}; }
  /// A rank that has left before it came to `entry`; "" if there is none. Tells this rank's page.
  std::string departure(const Dumps& dumps, const Entry& entry) const;
  static std::string mismatch(const Dumps& dumps);
  static std::string positions(const Dumps& dumps);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int world_size_;
  uint64_t count_ = 0;
  uint32_t hash_ = 2166136261u;  ///< of all texts
  std::deque<Entry> history_;
  bool failed_ = false;    ///< a collective of this rank has, which the others are to read
  bool explains_ = false;  ///< after_failure() has found why
  mutable Mutex mutex_;
  std::string interruption_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::gloo_engine
