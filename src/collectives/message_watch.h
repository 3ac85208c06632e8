#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/shared_segment.h"
#include "collectives/dropped_messages.h"
#include "collectives/message_deadlock.h"
#include "collectives/message_waiter.h"
#include "collectives/told_wait.h"
#include "collectives/wait_board.h"

namespace lockstep {

/// Finds ranks that wait for each other's messages, over engines whose waits cannot detect it.
///
/// A rank that has waited for a while announces its wait through the store, and withdraws the announcement when the
/// wait is over. A thread of the watch does this; it sleeps while no thread waits. Detection is reliable only while a
/// single thread calls the group: once a second one does, nothing more is reported.
///
/// The watch also completes messages that no thread waits for: a message whose completion is queried, in its own
/// thread, because only a wait can tell (MessageWaiter); and messages whose Work is gone (DroppedMessages).
class MessageWatch : public std::enable_shared_from_this<MessageWatch> {
 public:
  using Message = NotedMessage;

  /// The watch's thread calls `tell` once with its finding. The constructor deletes this rank's records of an earlier
  /// group over the same store.
  MessageWatch(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
               std::function<void(const std::string&)> tell = nullptr);
  ~MessageWatch() { stop(); }
  MessageWatch(const MessageWatch&) = delete;
  /// Ends the thread and detection.
  void stop() LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS;

  /// Disables reports, because several threads may call at any time, as in Python programs.
  void expect_several_callers();

  /// Wraps the message's Work so that waits for it are watched. Such a wait may throw Error.
  c10::intrusive_ptr<c10d::Work> watched(c10::intrusive_ptr<c10d::Work> inner, const Message& message);

  /// Counts a collective that has been called.
  void note_collective();

  /// Marks the calling thread as waiting for a collective while it exists.
  class CollectiveWait {
   public:
    /// `text` must outlive the object.
    CollectiveWait(MessageWatch& watch, uint64_t number, const std::string& text);
    ~CollectiveWait() { watch_.end_wait(); }
    CollectiveWait(const CollectiveWait&) = delete;

   private:
    MessageWatch& watch_;
  };
  /// Called when a wait for a collective takes long.
  void start_thread();
  /// Records another reason that has ended the group, a message that its receiver refuses, and tells waiting ranks.
  void declare(const std::string& text);
  /// Ends this rank's waits for messages with `why`. Any thread may call.
  void interrupt(const std::string& why);
  /// The finding; empty if none.
  std::string verdict();

 private:
  class WatchedMessage;
  using Note = ToldWait;
  /// The threads that call the group.
  struct Callers {
    const void* first = nullptr;  ///< an address unique to that thread
    bool are_several = false;
    void note(const void* caller) {
      if (first == nullptr) first = caller;
      if (first != caller) are_several = true;
    }
  };
  struct Wait {
    uint64_t serial = 0;
    const Message* message = nullptr;   ///< null: a collective
    c10d::Work* work = nullptr;         ///< of the message
    uint64_t number = 0;                ///< of the collective
    const std::string* text = nullptr;  ///< of the collective
    Clock::time_point next_look;
    std::chrono::milliseconds pause{0};
    bool is_told = false;  ///< to the other ranks
  };
  enum class ThreadState { kAwake, kDozing, kLooking };

  void note_caller() LOCKSTEP_REQUIRES(mutex_);
  void begin_wait(Wait wait);
  void end_wait();
  void start_thread_locked() LOCKSTEP_REQUIRES(mutex_);
  void note_over(std::list<Message>::iterator place, bool is_there);
  void note_done(std::list<Message>::iterator place) LOCKSTEP_REQUIRES(mutex_);
  void run();
  Note own_note() const LOCKSTEP_REQUIRES(mutex_);
  /// Called by the thread, which may use the store meanwhile.
  std::string look(const Note& own, bool is_sure);

  const std::function<void(const std::string&)> tell_;
  const unsigned fork_generation_ = fork_generation();
  WaitBoard board_;
  MessageDeadlock deadlock_;  ///< used by the thread

  Mutex mutex_;
  std::condition_variable changed_;
  Note done_ LOCKSTEP_GUARDED_BY(mutex_);  ///< what does not depend on the wait; its serial is the last wait's
  std::optional<Wait> wait_ LOCKSTEP_GUARDED_BY(mutex_);
  ThreadState thread_state_ LOCKSTEP_GUARDED_BY(mutex_) = ThreadState::kAwake;
  bool ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  Callers callers_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string verdict_ LOCKSTEP_GUARDED_BY(mutex_);
  DroppedMessages dropped_;
  std::thread thread_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
