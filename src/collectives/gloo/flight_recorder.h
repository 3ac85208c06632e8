#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/mutex.h"
#include "base/shared_segment.h"

namespace lockstep::gloo_engine {

/// A collective, which must be the same on every rank: its number in the group, counted from 1, and its text, such as
/// "all_reduce(float32, 43 elements, sum)". Its purpose (OperationLabel) is shown, not compared.
struct Entry {
  uint64_t number;
  std::string text;
  std::string purpose;

  /// The text and the purpose.
  std::string shown() const;
};

/// Records the last collectives of this rank. When one hangs or fails, the ranks exchange their records through the
/// store to find where they differ, as c10d's FlightRecorder does for NCCL. A collective that makes progress costs no
/// message. Used by the calling thread, except for interrupt() and leave_word().
class FlightRecorder {
 public:
  /// Deletes this rank's records of an earlier group over the same store.
  /// REQUIRES: the group has not been formed yet.
  FlightRecorder(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size)
      : store_(std::move(store)), rank_(rank), world_size_(world_size) {
    store_->deleteKey(key(rank_));
  }

  /// Adds a collective. The calling thread's label is its purpose.
  Entry add(std::string text);
  /// Gloo's tag for the messages of the last collective. It depends on all collectives so far. After collectives that
  /// differ, no messages match, so no rank takes one collective's data for another's, and a rank that only sends, and
  /// so never waits, is found at its next collective.
  uint32_t tag() const { return static_cast<uint32_t>(count_) << 16 | ((hash_ >> 16 ^ hash_) & 0xffff); }

  /// Called while this rank waits in `entry`: tells the others, and compares their records. Returns the mismatch, or ""
  /// if none is known.
  std::string compare(const Entry& entry);
  /// Called when `entry` has failed on this rank. Tells the others, and waits until all of them have reported their
  /// failure or `timeout` has passed. Returns the mismatch, or where each rank is.
  std::string after_failure(const Entry& entry, std::chrono::milliseconds timeout);
  /// The engine's own `cause` followed by after_failure(), unless the ranks know a better reason.
  std::string explain(const std::string& cause, const Entry& entry, std::chrono::milliseconds timeout);

  /// Tells ranks that wait in a later collective that this rank leaves after its last one. `unfinished` is the number
  /// of the first collective that is not done, and that this rank will not finish; 0: none. Later calls, and calls in a
  /// child of fork(), do nothing. Any thread may call.
  void leave_word(uint64_t unfinished = 0);

  /// Makes compare() return `why` from now on. Any thread may call.
  void interrupt(const std::string& why);
  /// Empty: there was no interrupt().
  std::string interruption() const;

 private:
  /// A rank's report.
  struct Dump {
    enum class State { kWaits, kFailed, kLeft } state = State::kWaits;
    Entry now{};                ///< the collective that it waits in, that failed, or that was its last
    uint64_t unfinished = 0;    ///< kLeft: the first one that it left before it was done; 0: none
    int launched = -1;          ///< the launcher's number for the rank; -1: unknown
    std::deque<Entry> history;  ///< the last collectives, `now` among them

    std::string packed() const;
    static Dump unpacked(const std::string& bytes);
    /// The collective with that number; null if unknown.
    const Entry* entry(uint64_t number) const;
  };
  /// One for each rank; none where a rank has not reported.
  using Dumps = std::vector<std::optional<Dump>>;

  std::string key(int rank) const { return "calls/" + std::to_string(rank); }
  /// Reports this rank's state, and reads the others' reports into `dumps`. False if the store is gone, with the rank
  /// or the launcher that served it: `dumps` then holds the earlier reports.
  bool exchange(const Dump& own, Dumps& dumps) const;
  Dump own_dump(const Entry& entry, Dump::State state) const;
  /// Describes a rank that left before it reached `entry`; "" if none. Tells this rank's page.
  std::string departure(const Dumps& dumps, const Entry& entry) const;
  static std::string mismatch(const Dumps& dumps);
  static std::string positions(const Dumps& dumps);

  const c10::intrusive_ptr<c10d::Store> store_;
  const int rank_;
  const int world_size_;
  const unsigned generation_ = fork_generation();  ///< of the process that made the group
  uint64_t count_ = 0;
  uint32_t hash_ = 2166136261u;      ///< of all texts
  std::atomic<bool> failed_{false};  ///< a collective of this rank has failed, and the others should read it
  std::atomic<bool> has_left_{false};
  bool explains_ = false;  ///< after_failure() has found the reason
  mutable Mutex mutex_;
  std::deque<Entry> history_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string interruption_ LOCKSTEP_GUARDED_BY(mutex_);
};

/// Lets std::exit(), which destroys nothing on the stack of its thread, leave the recorder's word if this thread calls
/// it.
void leave_word_at_exit(const std::shared_ptr<FlightRecorder>& recorder);

}  // namespace lockstep::gloo_engine
