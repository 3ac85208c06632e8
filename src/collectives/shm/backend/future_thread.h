#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include <c10/util/intrusive_ptr.h>

namespace lockstep::shm_engine {

class ShmWork;

/// Completes the futures of one group's works.
///
/// Whoever holds a future can only wait for it to be completed by somebody else, so a thread does what wait() would
/// do. It exists from the first future on, sleeps whenever nothing can be done, and never spins: the processor belongs
/// to those who compute.
class FutureThread {
 public:
  FutureThread();
  /// Any thread may destroy it, this one too. No work is left then: works keep their group.
  ~FutureThread();
  FutureThread(const FutureThread&) = delete;

  /// Sees to it that the work's future is completed. Any thread; never waits. False after end_all().
  bool add(const c10::intrusive_ptr<ShmWork>& work);
  /// Whether the caller runs in a callback of one of these futures.
  bool is_this_thread() const;

  /// Ends all such threads of this process for good, for an interpreter that is about to go: callbacks must not run
  /// while it does, nor be freed. What runs ends first; futures that are still waited for fail, later ones are
  /// completed by their callers. Waits for callbacks, at most this long; not to be called while holding what they need.
  static void end_all(std::chrono::milliseconds at_most);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // shared with the thread, which may outlive this object for a moment
  std::thread thread_;                  // guarded by the state's mutex
};

}  // namespace lockstep::shm_engine
