#include "collectives/hierarchical/runner.h"

#include <algorithm>
#include <utility>

#include <c10/util/Exception.h>

#include "base/interruption.h"
#include "base/library_thread.h"
#include "collectives/gloo/blocked_sigpipe.h"
#include "rank_page/wait_on_page.h"

namespace lockstep::hierarchical_engine {
namespace {

thread_local bool calling_back = false;

}  // namespace

Runner::Runner(std::function<void()> watch, std::function<void()> ask, Progress* progress, bool waiters_run)
    : progress_(progress), waiters_run_(waiters_run), job_watch_(std::move(watch), std::move(ask)) {
  const gloo_engine::BlockedSigpipe blocked;  // permanently, in this thread
  thread_ = library_thread([this] { work(); });
}

Runner::~Runner() {
  {
    const MutexLock lock(mutex_);
    ending_ = true;
    queue_.clear();
  }
  due_.notify_all();
  // The running job may wait for messages that only this thread can move.
  const auto since = Clock::now();
  while (progress_ != nullptr && progress_->is_up_to_this_thread() && !has_ended()) progress_->make(since);
  thread_.join();
}

bool Runner::has_ended() {
  const MutexLock lock(mutex_);
  return ended_;
}

void Runner::add(JobPtr job, bool at_once) {
  bool wake = false;
  {
    const MutexLock lock(mutex_);
    queue_.push_back(std::move(job));
    // A job with a waiting thread runs there, but must be watched: the runner's thread checks from time to time while
    // there are such jobs, and is woken if it had stopped.
    wake = !at_once || !waiters_run_ || dozing_;
  }
  if (wake) due_.notify_one();
}

void Runner::run_first(MutexLock& lock) {
  current_ = queue_.front();
  queue_.pop_front();
  current_->started = Clock::now();
  job_watch_.begin(current_->started);
  ++runs_;
  const JobPtr job = current_;
  lock.unlock();
  std::exception_ptr error;
  try {
    job->run();
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  job->run = nullptr;
  job->error = error;
  job->is_done = true;
  current_ = nullptr;
  lock.unlock();
  done_.notify_all();
  if (job->at_end) {
    const bool within_another = std::exchange(calling_back, true);
    // Callbacks of a future run here. An exception from one belongs neither to the thread, which would end the process,
    // nor to the operation for which the thread waits.
    try {
      job->at_end(error);
    } catch (const std::exception& exception) {
      TORCH_WARN("a callback of ", job->text, " threw: ", exception.what());
    }
    calling_back = within_another;
  }
  lock.lock();
}

void Runner::look(MutexLock& lock) {
  if (!current_) return;
  const auto now = Clock::now();
  job_watch_.ask_if_interrupted();
  if (!job_watch_.begin_look(now)) return;
  lock.unlock();
  job_watch_.watch();
  lock.lock();
  job_watch_.end_look(now);
}

void Runner::sleep(MutexLock& lock, std::condition_variable& notified, const Deadline* deadline) {
  auto pause = current_ ? job_watch_.pause(Clock::now()) : JobWatch::kFirstLook;
  if (can_be_interrupted()) pause = std::min(pause, JobWatch::kUntilAsked);
  if (deadline != nullptr) pause = std::min(pause, std::chrono::milliseconds(deadline->remaining_ms()));
  notified.wait_for(lock.native(), pause);
}

bool Runner::wait(const JobPtr& job, const Deadline* deadline) {
  const bool moves = progress_ != nullptr && progress_->is_up_to_this_thread();
  const bool runs = waiters_run_ || std::this_thread::get_id() == thread_.get_id();
  const auto since = Clock::now();
  check_for_interruption();
  MutexLock lock(mutex_);
  while (!job->is_done) {
    if (deadline != nullptr && deadline->passed()) return false;
    if (interruption_is_pending()) {
      lock.unlock();
      check_for_interruption();
      lock.lock();
    }
    look(lock);
    if (job->is_done) break;
    if (runs && !current_ && !queue_.empty()) {
      run_first(lock);
    } else if (moves) {
      lock.unlock();
      progress_->make(since);
      lock.lock();
    } else {
      WaitOnPage::show_again();
      sleep(lock, done_, deadline);
    }
  }
  if (!current_ && !queue_.empty()) due_.notify_one();
  return true;
}

bool Runner::is_calling_back() { return calling_back; }

bool Runner::is_done(const JobPtr& job) {
  if (progress_ != nullptr) progress_->poll();
  const MutexLock lock(mutex_);
  return job->is_done;
}

JobPtr Runner::first() const {
  if (current_) return current_;
  return queue_.empty() ? nullptr : queue_.front();
}

uint64_t Runner::first_number() {
  const MutexLock lock(mutex_);
  const JobPtr job = first();
  return job ? job->number : 0;
}

JobPtr Runner::finish(const Deadline& deadline) {
  const auto since = Clock::now();
  MutexLock lock(mutex_);
  // A job that ran here could not be left at the deadline.
  while (first() != nullptr && !deadline.passed()) {
    due_.notify_one();
    look(lock);
    if (progress_ != nullptr && progress_->is_up_to_this_thread()) {
      lock.unlock();
      progress_->make(since);
      lock.lock();
    } else {
      sleep(lock, done_, &deadline);
    }
  }
  return first();
}

void Runner::work() {
  MutexLock lock(mutex_);
  for (uint64_t seen = 0; !ending_;) {
    if (!current_ && !queue_.empty()) {
      run_first(lock);
    } else if (current_ || seen != runs_) {
      seen = runs_;
      look(lock);
      if (!ending_) sleep(lock, due_, nullptr);
    } else {
      dozing_ = true;
      due_.wait(lock.native());
      dozing_ = false;
    }
  }
  ended_ = true;
}

}  // namespace lockstep::hierarchical_engine
