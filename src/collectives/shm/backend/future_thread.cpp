#include "collectives/shm/backend/future_thread.h"

#include <condition_variable>
#include <vector>

#include "base/clock.h"
#include "base/library_thread.h"
#include "base/mutex.h"
#include "base/shared_segment.h"
#include "collectives/shm/backend/shm_work.h"

namespace lockstep::shm_engine {
namespace {

constexpr std::chrono::milliseconds kPollInterval{100};  ///< how often deadlines are checked while nothing happens

thread_local bool completes_futures = false;

}  // namespace

struct FutureThread::State {
  const unsigned fork_generation = lockstep::fork_generation();
  Mutex mutex;
  std::condition_variable changed;
  std::vector<c10::intrusive_ptr<ShmWork>> added LOCKSTEP_GUARDED_BY(mutex);
  bool over LOCKSTEP_GUARDED_BY(mutex) = false;      ///< no more work will come
  bool abandons LOCKSTEP_GUARDED_BY(mutex) = false;  ///< works that are not complete are abandoned
  bool runs LOCKSTEP_GUARDED_BY(mutex) = false;      ///< the thread exists

  /// The states of all such threads of this process, and whether there may be more. Never freed, because the last
  /// thread may end after main().
  struct All {
    Mutex mutex;
    std::vector<std::weak_ptr<State>> states LOCKSTEP_GUARDED_BY(mutex);
    bool ended LOCKSTEP_GUARDED_BY(mutex) = false;
  };
  static All& all() {
    static All* all = new All;
    return *all;
  }
};

FutureThread::FutureThread() : state_(std::make_shared<State>()) {
  State::All& all = State::all();
  const MutexLock lock(all.mutex);
  std::erase_if(all.states, [](const auto& state) { return state.expired(); });
  all.states.push_back(state_);
  const MutexLock own_lock(state_->mutex);
  state_->abandons = all.ended;
}

FutureThread::~FutureThread() {
  if (!thread_.joinable()) return;
  // A child of fork() has no such thread.
  if (state_->fork_generation != lockstep::fork_generation()) {
    thread_.detach();
    return;
  }
  {
    const MutexLock lock(state_->mutex);
    state_->over = true;
  }
  state_->changed.notify_all();
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}

bool FutureThread::add(const c10::intrusive_ptr<ShmWork>& work) {
  {
    const MutexLock lock(state_->mutex);
    if (state_->abandons) return false;
    state_->added.push_back(work);
    if (!thread_.joinable()) {
      thread_ = library_thread([state = state_] { run(state); });
      state_->runs = true;
    }
  }
  state_->changed.notify_all();
  return true;
}

bool FutureThread::is_this_thread() const {
  const MutexLock lock(state_->mutex);
  return thread_.get_id() == std::this_thread::get_id();
}

void FutureThread::end_all(std::chrono::milliseconds at_most) {
  const auto end = Clock::now() + at_most;
  State::All& all = State::all();
  std::vector<std::weak_ptr<State>> states;
  {
    const MutexLock lock(all.mutex);
    all.ended = true;
    states.swap(all.states);
  }
  for (const auto& weak : states) {
    const auto state = weak.lock();
    if (!state || state->fork_generation != lockstep::fork_generation()) continue;  // a child has no such thread
    MutexLock lock(state->mutex);
    state->abandons = true;
    state->changed.notify_all();
    while (state->runs && state->changed.wait_until(lock.native(), end) != std::cv_status::timeout) continue;
  }
}

bool FutureThread::is_running_here() { return completes_futures; }

void FutureThread::run(const std::shared_ptr<State>& state) {
  completes_futures = true;
  std::vector<c10::intrusive_ptr<ShmWork>> pending;
  bool abandons = false;
  for (;;) {
    {
      MutexLock lock(state->mutex);
      while (pending.empty() && !state->over && !state->abandons && state->added.empty())
        state->changed.wait(lock.native());
      for (auto& work : state->added) pending.push_back(std::move(work));
      state->added.clear();
      abandons = state->abandons;
      if (pending.empty() && (state->over || abandons)) {
        state->runs = false;
        state->changed.notify_all();
        return;
      }
    }
    std::erase_if(pending, [abandons](const auto& work) {
      if (work->complete_or_expire()) return true;
      if (abandons) work->abandon_future();
      return abandons;
    });
    if (!pending.empty()) pending.front()->poll(kPollInterval);
  }
}

}  // namespace lockstep::shm_engine
