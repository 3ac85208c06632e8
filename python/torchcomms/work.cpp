#include "work.h"

#include <condition_variable>
#include <deque>
#include <stdexcept>
#include <utility>

#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>
#include <c10/util/Exception.h>

#include "base/library_thread.h"
#include "base/mutex.h"

namespace lockstep::torchcomms {
namespace {

constexpr std::chrono::milliseconds kForHooks{1};

/// Works in the order of their start, and the thread that settles them. It has no end: nothing wakes it without works.
struct Queue {
  Mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<Clock::time_point, Unsettled>> works LOCKSTEP_GUARDED_BY(mutex);

  void run() {
    for (;;) {
      Unsettled due;
      {
        MutexLock lock(mutex);
        while (works.empty()) changed.wait(lock.native());
        const auto at = works.front().first;
        while (Clock::now() < at) changed.wait_until(lock.native(), at);
        due = std::move(works.front().second);
        works.pop_front();
      }
      EngineWork::settle_when_done(std::move(due));
    }
  }
};

}  // namespace

void settle_later(Unsettled unsettled) {
  static Queue* const queue = [] {
    auto* const made = new Queue;  // never freed: the thread may outlive main()
    library_thread([made] { made->run(); }).detach();
    return made;
  }();
  const MutexLock lock(queue->mutex);
  queue->works.emplace_back(Clock::now() + kForHooks, std::move(unsettled));
  if (queue->works.size() == 1) queue->changed.notify_one();
}

std::exception_ptr plain(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& told) {
    return std::make_exception_ptr(std::runtime_error(told.what_without_backtrace()));
  } catch (...) {
    return std::current_exception();
  }
}

EngineWork::EngineWork(Works works, std::chrono::milliseconds timeout, std::function<void()> on_failure)
    : timeout_(timeout), on_failure_(std::move(on_failure)), works_(std::move(works)) {
  setStatus(WorkStatus::INPROGRESS);
}

void EngineWork::wait() {
  runWaitPreHooks();
  finish();
  runWaitPostHooks();
}

void EngineWork::finish() {
  std::unique_lock lock(mutex_);
  const Works works = works_;
  lock.unlock();
  std::exception_ptr error;
  try {
    for (const auto& work : works) work->wait(timeout_);
  } catch (...) {
    error = plain(std::current_exception());
  }
  settle(std::move(error));
  lock.lock();
  if (error_) std::rethrow_exception(error_);
}

void EngineWork::settle(std::exception_ptr error) {
  Works settled;  // released after the lock
  const std::lock_guard lock(mutex_);
  if (std::exchange(settled_, true)) return;
  settled.swap(works_);
  error_ = std::move(error);
  if (!error_) return setStatus(WorkStatus::COMPLETED);
  on_failure_();
  setStatus(Clock::now() - started_ >= timeout_ ? WorkStatus::TIMEDOUT : WorkStatus::ERROR);
}

void EngineWork::settle_when_done(Unsettled unsettled) {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  {
    const std::lock_guard lock(unsettled.work->mutex_);
    if (unsettled.work->settled_) return;
    try {
      for (const auto& work : unsettled.work->works_) futures.push_back(work->getFuture());
    } catch (const std::exception&) {
      return;  // Gloo's messages, between machines, have none: their callers settle them.
    }
  }
  c10::collectAll(futures)->addCallback([unsettled = std::move(unsettled)](auto& all) {
    try {
      unsettled.work->settle(all.hasError() ? plain(all.exception_ptr()) : nullptr);
    } catch (...) {
      // A hook threw, which is no affair of this thread.
    }
  });
}

}  // namespace lockstep::torchcomms
