#pragma once

#include <chrono>
#include <functional>

#include "base/clock.h"

namespace lockstep::hierarchical_engine {

/// When threads that wait for a job look at it. Guarded by the mutex of the jobs, except where it says otherwise.
class JobWatch {
 public:
  /// By the first look nearly every rank that is merely late has come.
  static constexpr std::chrono::milliseconds kFirstLook{400}, kLongestPause{5000};
  static constexpr std::chrono::milliseconds kUntilAsked{200};  ///< whoever can be interrupted hears of it within

  /// `watch` is called while a job runs on another thread, when it has run for a while and then at growing intervals,
  /// by one thread at a time. `ask` is called some times a second while a job runs on a thread that can be interrupted,
  /// once there was an interruption of which no such thread has heard yet.
  JobWatch(std::function<void()> watch, std::function<void()> ask) : watch_(std::move(watch)), ask_(std::move(ask)) {}

  /// A job begins, on this thread.
  void begin(Clock::time_point now);
  void ask_if_interrupted() const;
  /// Whether this thread is to watch the job that runs: it then calls watch(), and after that end_look().
  bool begin_look(Clock::time_point now);
  /// Without the mutex.
  void watch() const { watch_(); }
  /// `begun`: the time that begin_look() was given.
  void end_look(Clock::time_point begun);
  /// How long a thread may sleep before it looks again.
  std::chrono::milliseconds pause(Clock::time_point now) const;

 private:
  const std::function<void()> watch_, ask_;
  Clock::time_point started_{};    ///< the job
  Clock::time_point next_look_{};  ///< at it
  bool watching_ = false;          ///< a thread does
  bool can_ask_ = false;           ///< the thread that runs the job
};

}  // namespace lockstep::hierarchical_engine
