#pragma once

#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <thread>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/mutex.h"
#include "collectives/message_waiter.h"
#include "collectives/told_wait.h"

namespace lockstep {

/// Completes messages whose Work is gone, one after the other, in a thread that starts with the first one.
class DroppedMessages {
 public:
  struct One {
    c10::intrusive_ptr<c10d::Work> work;
    std::shared_ptr<MessageWaiter> waiter;    ///< the thread that waits for it, if there is one
    std::list<NotedMessage>::iterator place;  ///< among the pending ones
  };
  /// Callbacks from the thread: `over` when a message has ended, preceded by `refused` if its receiver refuses it.
  struct Tell {
    std::function<void(const One&, bool is_there)> over;
    std::function<void(const std::string& text)> refused;
  };

  explicit DroppedMessages(Tell tell) : tell_(std::move(tell)) {}
  DroppedMessages(const DroppedMessages&) = delete;

  /// Continues a message until it is done or the group ends.
  /// REQUIRES: stop() has not been called.
  void keep(One message);
  /// Abandons the remaining messages. `is_forked`: the thread belongs to the process that forked.
  void stop(bool is_forked) LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS;

 private:
  void run();

  const Tell tell_;
  Mutex mutex_;
  std::condition_variable changed_;
  bool ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::list<One> messages_ LOCKSTEP_GUARDED_BY(mutex_);  ///< the thread removes them
  std::thread thread_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
