#pragma once

#include <chrono>
#include <functional>

#include "base/clock.h"

namespace lockstep::hierarchical_engine {

/// Schedule by which threads that wait for a job check on it. Guarded by the mutex of the jobs, except where noted.
class JobWatch {
 public:
  /// Nearly every rank that is merely late has arrived by the first look.
  static constexpr std::chrono::milliseconds kFirstLook{400}, kLongestPause{5000};
  static constexpr std::chrono::milliseconds kUntilAsked{200};  ///< interruptible threads notice within this time

  /// `watch` is called while a job runs on another thread: after a while and then at growing intervals, by one thread
  /// at a time. `ask` is called several times a second while a job runs on an interruptible thread, if there was an
  /// interruption that no such thread has noticed yet.
  JobWatch(std::function<void()> watch, std::function<void()> ask) : watch_(std::move(watch)), ask_(std::move(ask)) {}

  /// A job begins on this thread.
  void begin(Clock::time_point now);
  void ask_if_interrupted() const;
  /// Whether this thread must check the running job: it then calls watch() and end_look().
  bool begin_look(Clock::time_point now);
  /// Called without the mutex.
  void watch() const { watch_(); }
  /// `begun`: the time passed to begin_look().
  void end_look(Clock::time_point begun);
  /// How long a thread may sleep before its next look.
  std::chrono::milliseconds pause(Clock::time_point now) const;

 private:
  const std::function<void()> watch_, ask_;
  Clock::time_point started_{};    ///< of the job
  Clock::time_point next_look_{};  ///< at the job
  bool watching_ = false;          ///< a thread is in watch()
  bool can_ask_ = false;           ///< the thread that runs the job can be asked
};

}  // namespace lockstep::hierarchical_engine
