#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "base/clock.h"
#include "base/mutex.h"
#include "collectives/hierarchical/job_watch.h"
#include "collectives/hierarchical/progress.h"

namespace lockstep::hierarchical_engine {

/// An operation in the queue.
struct Job {
  std::function<void()> run;  ///< throws what went wrong
  uint64_t number = 0;        ///< of the collective, and its text
  std::string text;
  /// Called with the error after is_done, on the thread that ran the job; may be empty.
  std::function<void(const std::exception_ptr&)> at_end;
  Clock::time_point started{};  ///< once it runs
  std::exception_ptr error;     ///< once it is done
  bool is_done = false;
};
using JobPtr = std::shared_ptr<Job>;

/// Runs jobs one at a time, in the order in which they were added. A thread that waits for a job runs the due jobs
/// itself, if it may, which saves two wake-ups; otherwise the runner's own thread runs them. A thread that waits
/// without running jobs checks the running job from time to time.
class Runner {
 public:
  /// `watch` and `ask`: see JobWatch. `progress` is driven by a waiting thread that alone may move messages; null:
  /// messages move by themselves.
  /// `waiters_run`: waiting threads may run jobs. False if jobs wait for things other than messages while only the
  /// waiting thread can move messages.
  Runner(std::function<void()> watch, std::function<void()> ask, Progress* progress, bool waiters_run);
  /// Waits for the running job, and discards the others.
  ~Runner();
  Runner(const Runner&) = delete;

  /// Queues a job. Any thread may call. `at_once`: a thread will wait for it immediately.
  void add(JobPtr job, bool at_once);
  /// Returns true when the job is done, false at the deadline. Throws an Interruption.
  bool wait(const JobPtr& job, const Deadline* deadline);
  bool is_done(const JobPtr& job);
  /// Lets the runner's own thread run all jobs, and waits for it, at most until the deadline. Returns the first job
  /// that is not done; null: all are.
  JobPtr finish(const Deadline& deadline);
  /// The number of the first job that is not done; 0: all are.
  uint64_t first_number();
  /// Whether this thread is in a job's `at_end`. Such a thread may be the one that must run operations started there.
  static bool is_calling_back();

 private:
  void work();
  bool has_ended();
  JobPtr first() const LOCKSTEP_REQUIRES(mutex_);
  /// Runs the first job. Meanwhile releases the mutex through `lock`, which the analysis cannot identify with it.
  void run_first(MutexLock& lock) LOCKSTEP_REQUIRES(mutex_) LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS;
  /// Checks on the running job if it is time. Releases the mutex likewise.
  void look(MutexLock& lock) LOCKSTEP_REQUIRES(mutex_) LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS;
  /// Sleeps until notified, or until it is time to look.
  void sleep(MutexLock& lock, std::condition_variable& notified, const Deadline* deadline) LOCKSTEP_REQUIRES(mutex_);

  Progress* const progress_;
  const bool waiters_run_;
  Mutex mutex_;
  std::condition_variable done_;  ///< a job is done; for waiting threads
  std::condition_variable due_;   ///< a job is due; for the runner's thread
  std::deque<JobPtr> queue_ LOCKSTEP_GUARDED_BY(mutex_);
  JobPtr current_ LOCKSTEP_GUARDED_BY(mutex_);
  JobWatch job_watch_ LOCKSTEP_GUARDED_BY(mutex_);  ///< of the running job
  bool ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool ended_ LOCKSTEP_GUARDED_BY(mutex_) = false;   ///< the runner's thread has ended
  bool dozing_ LOCKSTEP_GUARDED_BY(mutex_) = false;  ///< the runner's thread no longer looks by itself
  uint64_t runs_ LOCKSTEP_GUARDED_BY(mutex_) = 0;    ///< jobs started
  std::thread thread_;
};

}  // namespace lockstep::hierarchical_engine
