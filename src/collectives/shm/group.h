#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "base/mutex.h"
#include "collectives/shm/arena.h"
#include "collectives/shm/channels.h"
#include "collectives/shm/eager_ring.h"
#include "collectives/shm/limits.h"
#include "collectives/shm/operation.h"
#include "collectives/shm/populated_ranges.h"
#include "collectives/shm/progress_set.h"
#include "collectives/shm/stuck_search.h"
#include "collectives/shm/verdict.h"
#include "collectives/shm/wait_policy.h"
#include "collectives/shm/world.h"

namespace lockstep::shm {

/// Collectives and messages between the ranks of one machine, over memory they share.
///
/// All ranks start the same collectives in the same order. They are executed in that order; several may be in flight.
/// start(), send() and receive() announce what they can, do the pending work that is ready, and return: they never
/// wait. Only start(), progress() and wait() make progress; there is no background thread. Any thread may call.
///
/// When a rank's process ends, ranks disagree, or a wait times out, the group ends on every rank: every pending and
/// later operation fails with the same text, which names rank and operation.
class Group {
 public:
  /// `limits` are for tests, and the same on every rank.
  explicit Group(World world, std::shared_ptr<ProgressSet> set = ProgressSet::process(),
                 std::optional<Limits> limits = std::nullopt);
  /// Leaves the group without waiting. What is pending fails here, and on the ranks that still need this one.
  ~Group();
  Group(const Group&) = delete;

  int rank() const { return world_.rank(); }
  int size() const { return world_.size(); }
  const World& world() const { return world_; }

  /// Starts a collective. Buffers must stay as they are until it is done, or as long as `keep_alive` keeps them.
  /// Throws Error for an invalid request; the Work carries every other error.
  WorkPtr start(Request request);
  /// Starts a message to another rank. It is done when the data has been copied, which needs the receiver if the
  /// message is larger than the channel.
  WorkPtr send(const void* data, size_t bytes, int to, int64_t tag, std::shared_ptr<void> keep_alive = nullptr,
               DataType type = DataType::kUInt8);
  /// Starts to receive a message of exactly `bytes` and `type` with this tag from rank `from`, or from the first
  /// sender (kAnySource). Messages of one sender and tag arrive in order. Another size or type ends the group.
  std::shared_ptr<Message> receive(void* data, size_t bytes, int from, int64_t tag,
                                   std::shared_ptr<void> keep_alive = nullptr, DataType type = DataType::kUInt8);

  /// Does what can be done now. True if something is still pending.
  bool progress();
  /// progress(), unless another thread is in it.
  bool try_progress();
  /// Returns when `work` is done; throws Error if it failed. When `timeout` has passed the whole group ends with an
  /// error that names all missing ranks.
  void wait(Work& work, std::chrono::milliseconds timeout);
  /// For a thread that waits for several things: does what can be done and, unless `work` is done then, sleeps until
  /// something happens or `at_most` has passed. Never spins, and never ends the group because time has passed.
  void poll(const Work& work, std::chrono::microseconds at_most);
  /// start() and wait(), without an allocation.
  void run(Request request, std::chrono::milliseconds timeout);

  /// Large sums of resident buffers are taken in parts from now on: a thread that makes progress calls `share_out`, and
  /// nothing that this runs may call the group. Without it, that thread does everything.
  void share_out_by(ShareOut share_out);

  /// Ranks that wait for each other's messages are told after two seconds, while one thread of a rank calls its group.
  /// With this, other threads may call at any time, and nobody is told.
  void expect_several_callers() {
    const Lock guard(*this);
    stuck_search_.expect_several_callers();
  }

  /// As World has it.
  int launched_rank(int rank) const { return world_.launched_rank(rank); }
  /// The ranks that this one was blocked on when it last tried to make progress, as bits. For reports.
  uint64_t waiting_for();

  /// Leaves the group now, as the destructor would: never waits, and what is pending fails here and on the ranks that
  /// still need this one. Every later operation throws Error. Memory from allocate() stays valid. A second call does
  /// nothing.
  void leave();
  /// Ends the group on every rank. Does nothing after leave().
  void abort(const std::string& why);

  /// Memory that collectives use in place; see Arena. Free it before the group is destroyed, or through arena().
  std::byte* allocate(size_t bytes) { return arena_->allocate(bytes); }
  void free(void* memory) { arena_->free(memory); }
  /// Where it lies in this rank's resident memory, and where such a place in any rank's lies in this process.
  size_t offset_of(const void* memory) const { return arena_->offset(memory); }
  std::byte* memory_of(int rank, size_t offset) const { return world_.resident(rank) + offset; }
  /// Keeps the mapping of a rank's memory.
  const std::shared_ptr<SharedSegment>& segment_of(int rank) const { return world_.shared_segment(rank); }
  bool is_resident(const void* memory, size_t bytes) const { return arena_->contains(memory, bytes); }
  /// Keeps this rank's own memory, and nothing else of the group, for whoever holds an allocation.
  const std::shared_ptr<Arena>& arena() const { return arena_; }

 private:
  /// The next collective's number; throws Error when there are none left.
  uint64_t next_sequence() LOCKSTEP_REQUIRES(mutex_);
  /// Completes and checks a request; throws Error if it is invalid. Returns the kernel that reduces its elements, or
  /// null if it is not a reduction.
  ReduceFunction prepare(Request& request) const;
  void check_process() const;
  void check_member() const;

  /// Holds the group's mutex. A thread that has to wait for it is counted, so that no other spins while holding it.
  class LOCKSTEP_SCOPED_CAPABILITY Lock {
   public:
    explicit Lock(Group& group) LOCKSTEP_ACQUIRE(group.mutex_) : group_(group) { group.lock(); }
    /// Takes over a mutex that is held.
    Lock(Group& group, std::adopt_lock_t /*held*/) LOCKSTEP_REQUIRES(group.mutex_) : group_(group) {}
    ~Lock() LOCKSTEP_RELEASE() {
      if (held_) group_.mutex_.unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;

    void unlock() LOCKSTEP_RELEASE() {
      held_ = false;
      group_.mutex_.unlock();
    }

   private:
    Group& group_;
    bool held_ = true;
  };
  void lock() LOCKSTEP_ACQUIRE(mutex_);

  // group_step.cpp: the stages of one operation
  bool progress_locked() LOCKSTEP_REQUIRES(mutex_);
  bool announce(Operation& operation, bool head) LOCKSTEP_REQUIRES(mutex_);
  bool place_package(Operation& operation, Line& line) LOCKSTEP_REQUIRES(mutex_);
  std::optional<size_t> allocate_eager(uint64_t sequence, size_t bytes) LOCKSTEP_REQUIRES(mutex_);
  bool arrive(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  void choose_method(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  bool splits_agree(const Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  bool move(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  bool move_at_once(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  bool move_in_place(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  bool move_in_rounds(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  void finish(Operation& operation) LOCKSTEP_REQUIRES(mutex_);
  bool everyone_finished(uint64_t sequence) LOCKSTEP_REQUIRES(mutex_);
  bool reads_pending_output(const Operation& operation) const LOCKSTEP_REQUIRES(mutex_);

  // group_wait.cpp. The first two let the mutex go in between; they throw nothing but an Interruption, when the group
  // has ended.
  void wait_locked(const Work& work, std::chrono::milliseconds timeout) LOCKSTEP_REQUIRES(mutex_);
  void sleep(const Work& work, std::chrono::microseconds at_most) LOCKSTEP_REQUIRES(mutex_);
  /// Whether a rank that this one waits for was last seen on the processor this thread runs on.
  bool processor_is_needed() LOCKSTEP_REQUIRES(mutex_);
  /// Another thread of this rank may be sleeping for what this thread has finished.
  void wake_own_sleepers() LOCKSTEP_REQUIRES(mutex_);
  /// `waited`: what the caller's thread waits for; null: it is not for itself that it waits.
  void find_departed_peers(const Work* waited) LOCKSTEP_REQUIRES(mutex_);
  void find_stuck_ranks(const Work& waited) LOCKSTEP_REQUIRES(mutex_);
  void time_out(const Work& waited, const WaitPolicy& policy) LOCKSTEP_REQUIRES(mutex_);
  /// Ends the group and throws the Interruption, if there is one. Lets the mutex go in between.
  void stop_if_interrupted() LOCKSTEP_REQUIRES(mutex_);
  void abort_locked(const std::string& why) LOCKSTEP_REQUIRES(mutex_);
  /// After an exception in run(): removes the operation from the queue and ends the group on every rank.
  void abort_operation(const Operation& operation, const char* why) LOCKSTEP_REQUIRES(mutex_);
  /// Whether there is a verdict; if so, fails everything pending with its text.
  bool is_over() LOCKSTEP_REQUIRES(mutex_);
  void fail_all(const std::string& why) LOCKSTEP_REQUIRES(mutex_);

  World world_;
  const std::shared_ptr<ProgressSet> set_;
  const Limits limits_;
  const unsigned fork_generation_;
  const std::shared_ptr<Arena> arena_;

  std::atomic<bool> left_{false};
  std::atomic<int> contenders_{0};
  Mutex mutex_;
  Channels channels_ LOCKSTEP_GUARDED_BY(mutex_);
  /// Unfinished collectives in order; the first announced_ of them are announced.
  std::deque<OperationPtr> queue_ LOCKSTEP_GUARDED_BY(mutex_);
  size_t announced_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t started_ LOCKSTEP_GUARDED_BY(mutex_);   ///< collectives
  uint64_t finished_ LOCKSTEP_GUARDED_BY(mutex_);  ///< collectives that this rank has finished
  /// Of the operations before the first in the queue; the same on all ranks.
  uint64_t rounds_before_ LOCKSTEP_GUARDED_BY(mutex_);
  /// What is known of each rank.
  std::array<uint64_t, kMaxRanks> finished_by_ LOCKSTEP_GUARDED_BY(mutex_){};
  /// Of the others' resident areas.
  std::array<PopulatedRanges, kMaxRanks> populated_ LOCKSTEP_GUARDED_BY(mutex_);
  EagerRing eager_ LOCKSTEP_GUARDED_BY(mutex_);
  ShareOut share_out_ LOCKSTEP_GUARDED_BY(mutex_);  ///< may be null
  /// Ranks that the last progress_locked() was blocked on, as bits.
  uint64_t blocked_on_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  uint64_t blocked_on_any_ LOCKSTEP_GUARDED_BY(mutex_) = 0;  ///< any one of these would do
  uint64_t rounds_moved_ LOCKSTEP_GUARDED_BY(mutex_) = 0;    ///< of large operations, in all
  StuckSearch stuck_search_ LOCKSTEP_GUARDED_BY(mutex_);
  int sleepers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::string verdict_text_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::shm
