#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/thread_token.h"

namespace lockstep {

/// A copy of a page's contents.
struct RankStatus {
  enum class Phase : uint8_t {
    kUnknown,
    kCommunicates,  ///< it reports only its collectives, not its steps or its leaving
    kJoining,       ///< it waits for all ranks to join
    kJoined,
    kLeft,
    kLeftByException
  };
  struct Operation {
    uint64_t sequence = 0;
    std::string kind;  ///< empty: no collective has been started
    std::string dtype;
    std::vector<int64_t> shape;  ///< the first dimensions, at most RankPage::kShownDimensions
    int64_t elements = 0;
    std::string of;     ///< its purpose (OperationLabel); empty: unknown
    std::string group;  ///< Group::text() of its group; empty: the group of all ranks, or unknown
    uint64_t group_id = 0;
    bool running = false;
    Clock::time_point started;

    /// "all_reduce #12 (float32 [64, 10]) in subgroup 1 (ranks 0, 2) of bucket 1 of 2 (out.bias to out.weight)".
    std::string text() const;
  };
  /// A process group that includes the rank.
  struct Group {
    uint64_t id = 0;           ///< the same on all its ranks
    uint64_t members = 0;      ///< ranks, as bits; 0: not known
    std::string name;          ///< empty: the group of all ranks
    uint64_t collectives = 0;  ///< that the rank has started there

    /// "subgroup 1 (ranks 0, 2)", "the group of all ranks".
    std::string text() const;
  };
  /// The collective that it waits for, which need not be the last one that it started.
  struct Awaited {
    uint64_t group = 0;       ///< Group::id; 0: not known
    uint64_t sequence = 0;    ///< as Operation::sequence
    uint64_t collective = 0;  ///< its number among the group's, counted from 1
    uint64_t needs = 0;       ///< the ranks whose call it needs to end, as bits
    bool needs_some = false;  ///< of these at least one, it is not known which, rather than all
  };

  pid_t pid = 0;  ///< of the process that writes; 0: none has written yet
  Phase phase = Phase::kUnknown;
  RankFailure failure = RankFailure::kNone;
  int peer = -1;  ///< the rank that caused its failure; -1: unknown
  /// kMismatch: the other rank whose call does not match; -1: this rank.
  int opponent = -1;
  std::string failure_text;
  bool uncaught = false;                        ///< an uncaught exception with this text ends the process
  RankFailure last_error = RankFailure::kNone;  ///< of the last error thrown, whether or not it was caught
  int last_error_peer = -1;
  std::string last_error_text;
  bool error_is_last = false;  ///< nothing else has happened since
  Operation operation;
  bool waiting = false;  ///< one of its threads waits for a collective, with or without naming ranks
  Awaited awaited;       ///< while it is `waiting`
  std::vector<Group> groups;
  /// One thread has made all groups and called all operations, or the others that did wait for it or have ended, and it
  /// is not known that another may use a group next.
  bool has_one_caller = false;
  uint64_t waits_for = 0;   ///< the ranks it waits for, as bits; only while an operation runs or is awaited
  uint64_t beats = 0;       ///< grows with all its activity
  uint64_t heartbeats = 0;  ///< of the program (lockstep::heartbeat()); part of beats
  Clock::time_point last_heartbeat;
  std::chrono::milliseconds collective_timeout{0};  ///< how long one of its collectives may take; 0: unknown
  int64_t steps = 0;                                ///< training steps since it started
  int64_t first_step = 0;                           ///< of the checkpoint that it resumed; 0: none
  uint64_t stop_calls = 0;                          ///< how often it has called stop_requested() (StopAgreement)
  std::string checkpoint;                           ///< path of the newest complete checkpoint; empty: none known
  int64_t checkpoint_step = 0;
  int64_t memory_step = -1;           ///< last checkpoint in the launcher's memory that includes its part; -1: none
  Clock::time_point checkpoint_time;  ///< when it was written, or found

  /// How to read it once the rank has ended: an error with no activity after it is the reason.
  RankStatus at_end() const;
};

/// A rank's state, in memory shared with the launcher, which can read it at any time, even after the rank has ended.
/// Writing costs a few stores and no system call. One thread at a time should write the operation; if several do, a
/// reader may see a mixture, which only affects the text of a report.
///
/// Readers must not trust it: the program may have written anything.
class RankPage {
 public:
  static constexpr size_t kBytes = 8192;
  static constexpr size_t kShownDimensions = 6;
  static constexpr int kShownGroups = 64;
  static constexpr int kNoGroup = -1;  ///< a place

  void begin(pid_t pid);
  pid_t pid() const { return pid_.load(std::memory_order_relaxed); }
  void set_phase(RankStatus::Phase phase) { phase_.store(phase, std::memory_order_release); }

  /// For programs that report only collectives.
  void communicates() {
    if (phase_.load() == RankStatus::Phase::kUnknown) set_phase(RankStatus::Phase::kCommunicates);
  }

  /// Begins a collective or message. `kind` and `dtype` are literals, so that the present one is recognized by its
  /// address. `shape` may be a part of the tensor's; `of` is the purpose of the operation.
  void start_operation(uint64_t sequence, const char* kind, const char* dtype, int64_t elements, const int64_t* shape,
                       size_t dimensions, Clock::time_point now, std::string_view of = {}, int group = kNoGroup);
  /// Ends the operation with this number, if it is the last that began.
  void finish_operation(uint64_t sequence) {
    if (sequence_.load(std::memory_order_relaxed) == sequence) running_.store(0, std::memory_order_relaxed);
    beat();
  }
  void set_waits_for(uint64_t ranks) { waits_for_.store(ranks, std::memory_order_relaxed); }
  /// Begins or ends a wait; see RankStatus::waiting.
  void set_waiting(bool waiting) {
    if (!waiting) set_waits_for(0);
    awaited_group_.store(kNoGroup, std::memory_order_relaxed);
    waiting_.store(waiting ? 1 : 0, std::memory_order_relaxed);
  }
  /// Records that the calling thread uses a group; see RankStatus::has_one_caller. start_operation() does so, too.
  void note_caller() {
    const uint64_t here = thread_number();
    if (caller_.load(std::memory_order_relaxed) != here) note_other_caller(here);
  }
  /// Records that no other thread than this one, by thread_number(), can use a group until it does, although others
  /// have.
  void note_only_caller(uint64_t thread) {
    caller_.store(thread, std::memory_order_relaxed);
    has_several_callers_.store(0, std::memory_order_relaxed);
  }
  /// Records whether another thread of the rank may use a group next; see RankStatus::has_one_caller.
  void note_free_threads(bool any) { has_free_threads_.store(any ? 1 : 0, std::memory_order_relaxed); }
  /// The thread that uses groups, by thread_number(); 0: none has.
  uint64_t caller() const { return caller_.load(std::memory_order_relaxed); }
  /// Begins a wait in the group with this place. For a message, `awaited.collective` is 0.
  void begin_wait(int group, const RankStatus::Awaited& awaited) {
    awaited_group_.store(awaited.collective == 0 ? kNoGroup : group, std::memory_order_relaxed);
    awaited_sequence_.store(awaited.sequence, std::memory_order_relaxed);
    awaited_collective_.store(awaited.collective, std::memory_order_relaxed);
    awaited_needs_.store(awaited.needs, std::memory_order_relaxed);
    awaited_needs_some_.store(awaited.needs_some ? 1 : 0, std::memory_order_relaxed);
    waiting_.store(1, std::memory_order_relaxed);
  }

  /// Returns the group's place on the page, or kNoGroup if all are taken. Records the caller. `id` is not 0.
  int add_group(uint64_t id, uint64_t members, std::string_view name);
  void remove_group(int place);
  /// Sets the number of the group's collectives.
  void note_collective(int place, uint64_t collectives) {
    groups_[place].collectives.store(collectives, std::memory_order_relaxed);
  }
  void set_collective_timeout(std::chrono::milliseconds timeout) {
    collective_timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
  }
  std::chrono::milliseconds collective_timeout() const;
  /// Records activity: an operation has ended, or a part of a large one has moved. Any thread may call.
  void beat() { beats_.store(beats_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed); }
  /// Records the program's heartbeat. Any thread may call.
  void heartbeat() {
    heartbeats_.fetch_add(1, std::memory_order_relaxed);
    heartbeat_ns_.store(coarse_now().time_since_epoch().count(), std::memory_order_relaxed);
  }

  /// Records why this rank cannot continue. The first cause stays, because later ones follow from it. `opponent`: see
  /// RankStatus.
  void fail(RankFailure failure, int peer, std::string_view text, int opponent = -1);
  /// Records that an exception ends this rank's work. If a failure of its own was recorded without a text (by a
  /// destructor, which sees that an exception passes but not which one), it gets this text. `uncaught`: the exception
  /// ends the process.
  void fail_by_exception(std::string_view text, bool uncaught);
  bool has_failed() const { return failure_.load(std::memory_order_relaxed) != 0; }

  /// Records an error of this kind that is about to be thrown. Unlike a failure, it no longer counts once the rank does
  /// something else (a collective, a step, a call of stop_requested), since a program may catch it and continue.
  void note_error(RankFailure kind, int peer, std::string_view text);
  bool error_is_last() const { return error_.load() != 0 && error_progress_.load() == progress(); }
  /// Keeps the error: the activity since only served to tell other ranks about it.
  void renew_error() { error_progress_.store(progress()); }

  /// Records that the model was updated, or is about to be.
  void count_step() {
    steps_.store(steps_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    beat();
  }
  /// Records that a complete checkpoint is on disk. Before the first step: training resumes from it.
  void note_checkpoint(std::string_view path, int64_t step, Clock::time_point now);
  /// Records that this rank's part of a checkpoint is in the launcher's memory. Before the first step: as above.
  void note_memory_checkpoint(int64_t step);
  /// For StopAgreement.
  std::atomic<uint64_t>& stop_calls() { return stop_calls_; }
  const std::atomic<uint64_t>& stop_calls() const { return stop_calls_; }

  RankStatus read(int world_size) const;

  /// Replaces this page by a copy of another machine's, whose clock is `ahead_ns` ahead of this one's. For a launcher,
  /// on a board that no rank writes. `bytes` has kBytes bytes.
  void copy_from(const void* bytes, int64_t ahead_ns);

 private:
  uint64_t progress() const {
    return beats_.load(std::memory_order_relaxed) + stop_calls_.load(std::memory_order_relaxed) +
           heartbeats_.load(std::memory_order_relaxed);
  }

  void note_other_caller(uint64_t here);
  void read_groups(RankStatus& account, int shown, int awaited) const;

  template <size_t kSize>
  class Text {  // written and read in words, since both may happen at the same time
   public:
    void store(std::string_view text);
    std::string load() const;

   private:
    std::atomic<uint64_t> words_[kSize / 8] = {};
  };

  struct Group {
    std::atomic<uint64_t> id{0};  ///< 0: none, or being added
    std::atomic<uint64_t> members{0};
    std::atomic<uint64_t> collectives{0};
    Text<24> name;
  };

  std::atomic<pid_t> pid_{0};
  std::atomic<RankStatus::Phase> phase_{RankStatus::Phase::kUnknown};
  std::atomic<uint32_t> failure_claim_{0};
  std::atomic<uint64_t> failure_{0};  ///< kind, peer and opponent, written after the text

  alignas(64) std::atomic<uint32_t> version_{0};  ///< odd while the following is written
  std::atomic<uint32_t> running_{0};
  std::atomic<uint64_t> sequence_{0};
  Text<16> kind_, dtype_;
  std::atomic<const char*> kind_literal_{nullptr}, dtype_literal_{nullptr};  ///< for the writer to compare
  Text<128> of_;
  std::atomic<int64_t> elements_{0};
  std::atomic<int64_t> started_ns_{0};
  std::atomic<uint64_t> dimensions_{0};
  std::atomic<int64_t> shape_[kShownDimensions] = {};
  std::atomic<uint64_t> waits_for_{0};
  std::atomic<uint64_t> beats_{0};
  std::atomic<int64_t> steps_{0};
  std::atomic<uint64_t> stop_calls_{0};
  std::atomic<uint32_t> waiting_{0};
  std::atomic<uint32_t> uncaught_{0};
  std::atomic<int64_t> collective_timeout_ms_{0};
  std::atomic<uint64_t> heartbeats_{0};
  std::atomic<int64_t> heartbeat_ns_{0};

  alignas(64) Text<1024> failure_text_;
  Text<1024> checkpoint_;
  std::atomic<int64_t> checkpoint_step_{0};
  std::atomic<int64_t> checkpoint_ns_{0};  ///< 0: none; written after the others
  std::atomic<int64_t> first_step_{0};
  std::atomic<int64_t> memory_steps_{0};  ///< the step plus 1; 0: none

  Text<512> error_text_;
  std::atomic<uint64_t> error_progress_{0};
  std::atomic<uint32_t> error_{0};  ///< kind and peer, written after the others

  alignas(64) std::atomic<int32_t> operation_group_{kNoGroup};
  std::atomic<int32_t> awaited_group_{kNoGroup};
  std::atomic<uint64_t> awaited_sequence_{0};
  std::atomic<uint64_t> awaited_collective_{0};
  std::atomic<uint64_t> awaited_needs_{0};
  std::atomic<uint32_t> awaited_needs_some_{0};
  std::atomic<uint64_t> caller_{0};  ///< the number of the first thread that has called, or of the only one
  std::atomic<uint32_t> has_several_callers_{0};
  std::atomic<uint32_t> has_free_threads_{0};
  std::atomic<uint64_t> taken_groups_{0};  ///< places, as bits
  Group groups_[kShownGroups];
};
static_assert(sizeof(RankPage) <= RankPage::kBytes);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<RankStatus::Phase>::is_always_lock_free);

}  // namespace lockstep
