#pragma once

#include <chrono>
#include <memory>
#include <thread>

#include <c10/util/intrusive_ptr.h>

namespace lockstep::shm_engine {

class ShmWork;

/// Completes the futures of one group's works.
///
/// The holder of a future can only wait until another thread completes it, so this thread does what wait() would do. It
/// exists from the first future on, sleeps whenever nothing can be done, and never spins: the processors are for
/// computing.
class FutureThread {
 public:
  FutureThread();
  /// Any thread may destroy it, even its own. No work is left then, since works keep their group.
  ~FutureThread();
  FutureThread(const FutureThread&) = delete;

  /// Ensures that the work's future is completed. Any thread may call; never waits. Returns false after end_all().
  bool add(const c10::intrusive_ptr<ShmWork>& work);
  /// Whether the caller is in a callback of one of these futures.
  bool is_this_thread() const;
  /// Whether the caller is the thread of any group's futures.
  static bool is_running_here();

  /// Ends all such threads of this process for good, before the interpreter shuts down: callbacks must neither run nor
  /// be freed during that. Waits for running callbacks, at most this long; do not call it while holding a lock that
  /// they need. Incomplete futures fail; later ones are completed by their callers.
  static void end_all(std::chrono::milliseconds at_most);

 private:
  struct State;
  static void run(const std::shared_ptr<State>& state);

  const std::shared_ptr<State> state_;  // shared with the thread, which may briefly outlive this object
  std::thread thread_;                  // guarded by the state's mutex
};

}  // namespace lockstep::shm_engine
