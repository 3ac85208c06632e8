#include "collectives/shm/backend/future_thread.h"

#include <condition_variable>
#include <mutex>
#include <vector>

#include "base/shared_segment.h"
#include "collectives/shm/backend/shm_work.h"

namespace lockstep::shm_engine {
namespace {

constexpr std::chrono::milliseconds kLook{100};  ///< how often deadlines are looked at while nothing happens

}  // namespace

struct FutureThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<c10::intrusive_ptr<ShmWork>> added;  // guarded by mutex
  bool over = false;                               // guarded by mutex
};

FutureThread::FutureThread() : state_(std::make_shared<State>()), fork_generation_(lockstep::fork_generation()) {}

FutureThread::~FutureThread() {
  if (!thread_.joinable()) return;
  // In a child of fork() there is no such thread.
  if (fork_generation_ != lockstep::fork_generation()) {
    thread_.detach();
    return;
  }
  {
    std::lock_guard lock(state_->mutex);
    state_->over = true;
  }
  state_->changed.notify_one();
  if (thread_.get_id() == std::this_thread::get_id())
    thread_.detach();
  else
    thread_.join();
}

void FutureThread::add(c10::intrusive_ptr<ShmWork> work) {
  {
    std::lock_guard lock(state_->mutex);
    state_->added.push_back(std::move(work));
    if (!thread_.joinable()) thread_ = std::thread([state = state_] { run(state); });
  }
  state_->changed.notify_one();
}

bool FutureThread::is_this_thread() const {
  std::lock_guard lock(state_->mutex);
  return thread_.get_id() == std::this_thread::get_id();
}

void FutureThread::run(const std::shared_ptr<State>& state) {
  std::vector<c10::intrusive_ptr<ShmWork>> pending;
  for (;;) {
    {
      std::unique_lock lock(state->mutex);
      if (pending.empty()) state->changed.wait(lock, [&] { return state->over || !state->added.empty(); });
      for (auto& work : state->added) pending.push_back(std::move(work));
      state->added.clear();
      if (state->over && pending.empty()) return;
    }
    std::erase_if(pending, [](const auto& work) { return work->complete_or_expire(); });
    if (!pending.empty()) pending.front()->rest(kLook);
  }
}

}  // namespace lockstep::shm_engine
