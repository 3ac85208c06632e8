#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/clock.h"
#include "collectives/shm/protocol/admission.h"
#include "collectives/shm/protocol/channels.h"
#include "collectives/shm/protocol/counted_mutex.h"
#include "collectives/shm/protocol/operation.h"
#include "collectives/shm/protocol/progress_engine.h"
#include "collectives/shm/protocol/progress_set.h"
#include "collectives/shm/protocol/waiter.h"
#include "collectives/shm/segment/arena.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// One rank's part in a group of ranks on one machine: collectives and messages over memory that they share.
///
/// All ranks start the same collectives in the same order. They are executed in that order; several may be in flight.
/// start(), send() and receive() announce what they can, do the pending work that is ready, and return: they never
/// wait. Only start(), progress() and wait() make progress; there is no background thread. Any thread may call.
///
/// When a rank's process ends, ranks disagree, or a wait times out, the group ends on every rank: every pending and
/// later operation fails with the same text, which names rank and operation.
class Communicator {
 public:
  /// `limits` are for tests, and the same on every rank.
  explicit Communicator(World world, std::shared_ptr<ProgressSet> set = ProgressSet::process(),
                        std::optional<Limits> limits = std::nullopt);
  /// Leaves the group without waiting. What is pending fails here, and on the ranks that still need this one.
  ~Communicator();
  Communicator(const Communicator&) = delete;

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

  /// send() of a message that mostly goes out whole, now. Null: it is over; else what is to be waited for.
  WorkPtr send_at_once(const void* data, size_t bytes, int to, int64_t tag, DataType type);
  /// receive() and wait(). Returns the sender.
  int receive_now(void* data, size_t bytes, int from, int64_t tag, DataType type, std::chrono::milliseconds timeout);

  /// Does what can be done now. True if something is still pending.
  bool progress();
  /// progress(), unless another thread is in it.
  bool try_progress();
  /// Returns when `work` is done; throws Error if it failed. When `timeout` has passed the whole group ends with an
  /// error that names all missing ranks. `since`: as if the wait had begun then, for a caller that has asked so far
  /// whether it is done.
  void wait(Work& work, std::chrono::milliseconds timeout, Clock::time_point since = {});
  /// For a thread that waits for several things: does what can be done and, unless `work` is done then, sleeps until
  /// something happens or `at_most` has passed. Never spins, and never ends the group because time has passed.
  void poll(const Work& work, std::chrono::microseconds at_most);
  /// start() and wait(), without an allocation. `announced`, unless null, is called in between, when the others no
  /// longer wait for this rank: what it does takes none of their time. It must not throw.
  void run(Request&& request, std::chrono::milliseconds timeout, const std::function<void()>& announced = nullptr);

  /// Large sums of resident buffers are taken in parts from now on: a thread that makes progress calls `share_out`, and
  /// nothing that this runs may call the group. Without it, that thread does everything.
  void share_out_by(ShareOut share_out);

  /// Runs `body` on what waits in this group, under the group's mutex. `at_once`: unless another thread is in the
  /// group. Returns whether it has.
  bool with_waiter(const std::function<void(Waiter&)>& body, bool at_once = false);

  /// The ranks that this one was blocked on when it last tried to make progress, as bits. For reports.
  uint64_t waiting_for();

  /// Waits until this rank's collectives are done and its messages sent, the group has ended, or `deadline`. Returns
  /// what is wrong with the first collective that is not done; empty: all are, or this rank has left, or this is a
  /// child of fork().
  std::string finish(const Deadline& deadline);

  /// Leaves the group now, as the destructor would: never waits, and what is pending fails here and on the ranks that
  /// still need this one. Every later operation throws Error. Memory from allocate() stays valid. A second call does
  /// nothing.
  void leave();
  /// Ends the group on every rank. Does nothing after leave().
  void abort(const std::string& why);

  /// Memory that collectives use in place; see Arena. Free it before the group is destroyed, or through arena().
  std::byte* allocate(size_t bytes) { return arena_->allocate(bytes); }
  void free(void* memory) { arena_->free(memory); }
  /// This rank's own memory. Who holds the arena keeps its allocations, and nothing else of the group.
  const std::shared_ptr<Arena>& arena() const { return arena_; }
  /// Where a place in a rank's memory, as Arena::offset() tells that rank, lies in this process.
  std::byte* memory_of(int rank, size_t offset) const { return world_.resident(rank) + offset; }

 private:
  void check_peer(const char* call, int peer) const;

  World world_;
  const std::shared_ptr<ProgressSet> set_;
  const std::shared_ptr<Arena> arena_;
  Admission admission_;
  CountedMutex mutex_;
  ProgressEngine engine_ LOCKSTEP_GUARDED_BY(mutex_);
  Waiter waiter_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::shm
