#include "collectives/shm/backend/shm_work.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <ATen/record_function.h>

#include "base/error.h"
#include "base/interruption.h"
#include "collectives/shm/protocol/channels.h"

namespace lockstep::shm_engine {
namespace {

std::optional<std::vector<at::Tensor>> profiled(const std::vector<at::Tensor>& inputs) {
  if (!at::hasCallbacks()) return std::nullopt;
  return inputs;
}

}  // namespace

ShmWork::ShmWork(BackendStatePtr shared, TensorRequest request, std::vector<shm::WorkPtr> works,
                 std::chrono::milliseconds timeout, uint64_t sequence, std::optional<PageNote> shown)
    : Work(shared->core().rank(), request.type, at::hasCallbacks() ? request.title : nullptr, profiled(request.inputs)),
      shared_(std::move(shared)),
      timeout_(timeout),
      sequence_(sequence),
      shown_(shown),
      works_(std::move(works)),
      finish_(std::move(request.finish)),
      result_(std::move(request.result)) {
  if (shown_) note_start(this, request.title, request.inputs, sequence, shown_->group);
}

shm::Work* ShmWork::first_pending() const {
  for (const auto& work : works_)
    if (!work->done()) return work.get();
  return nullptr;
}

void ShmWork::settle() {
  if (settled_.load(std::memory_order_acquire)) return;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::vector<std::function<void()>> finish;
  {
    std::lock_guard lock(mutex_);
    if (completed_) return;
    try {
      for (const auto& work : works_)
        if (work->failed()) C10_THROW_ERROR(DistBackendError, work->error());
      at::NoGradGuard no_grad;
      for (const auto& step : finish_) step();
    } catch (...) {
      exception_ = std::current_exception();
    }
    finish.swap(finish_);
    future = std::move(future_);
    completed_ = true;
    settled_.store(true, std::memory_order_release);
  }
  if (shown_) note_end(this, sequence_, exception_ != nullptr);
  if (recordFunctionEndCallback_) recordFunctionEndCallback_();
  shared_->free_released();
  if (!future) return;
  if (exception_)
    future->setError(exception_);
  else
    future->markCompleted(c10::IValue(result_));
}

bool ShmWork::isCompleted() {
  if (settled_.load(std::memory_order_acquire)) return true;
  if (first_pending() != nullptr) shared_->core().progress();
  if (first_pending() != nullptr && Clock::now() - asked_since() >= timeout_) wait_for_core(timeout_, asked_since());
  if (first_pending() != nullptr) return false;
  settle();
  return true;
}

Clock::time_point ShmWork::asked_since() {
  Clock::rep since = 0;
  const Clock::time_point now = Clock::now();
  asked_since_.compare_exchange_strong(since, now.time_since_epoch().count());
  return since == 0 ? now : Clock::time_point(Clock::duration(since));
}

bool ShmWork::isSuccess() const { return settled_.load(std::memory_order_acquire) && exception_ == nullptr; }

std::exception_ptr ShmWork::exception() const {
  return settled_.load(std::memory_order_acquire) ? exception_ : nullptr;
}

int ShmWork::sourceRank() const {
  const auto* message = works_.empty() ? nullptr : dynamic_cast<const shm::Message*>(works_.front().get());
  return message == nullptr ? Work::sourceRank() : message->source();
}

std::vector<at::Tensor> ShmWork::result() {
  TORCH_CHECK(isCompleted(), "result() was called on an operation that is not complete; call wait() first");
  return result_;
}

void ShmWork::wait_for_core(std::chrono::milliseconds timeout, Clock::time_point since) {
  while (auto* pending = first_pending()) {
    try {
      shared_->core().wait(*pending, timeout, since);
    } catch (const Interruption&) {
      shared_->note_told();
      throw;
    } catch (const Error&) {
      // The core's Work carries the error as well.
      if (!pending->done()) throw;
    }
  }
}

bool ShmWork::wait(std::chrono::milliseconds timeout) {
  if (!settled_.load(std::memory_order_acquire)) {
    const auto at_most = timeout == kNoTimeout ? timeout_ : timeout;
    {
      std::optional<WaitOnPage> waiting;
      if (shown_) {
        own_page().note_caller();
        waiting.emplace(shown_->group, shown_->within(at_most));
      }
      wait_for_core(at_most);
    }
    settle();
  }
  if (exception_) {
    shared_->note_told();
    std::rethrow_exception(exception_);
  }
  return true;
}

void ShmWork::abort() { shared_->core().abort("abort() was called on an operation"); }

c10::intrusive_ptr<c10::ivalue::Future> ShmWork::getFuture() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  if (!isCompleted() && !shared_->futures().is_this_thread()) {
    std::lock_guard lock(mutex_);
    if (future_) return future_;
    if (!completed_ && shared_->futures().add(c10::intrusive_ptr<ShmWork>::reclaim_copy(this))) {
      future_ = future;
      return future;
    }
  }
  if (!isCompleted()) {
    // The caller is in a callback of another future, which may wait for this one, or the thread has ended: no other
    // thread can complete the future.
    wait_for_core(timeout_);
    settle();
  }
  if (exception_)
    future->setError(exception_);
  else
    future->markCompleted(c10::IValue(result_));
  return future;
}

bool ShmWork::complete_or_expire() {
  if (isCompleted()) return true;
  if (Clock::now() - started_ < timeout_) return false;
  try {
    wait_for_core(timeout_, started_);
  } catch (const std::exception&) {
    return false;
  }
  settle();
  return true;
}

void ShmWork::abandon_future() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(mutex_);
    future = std::move(future_);
  }
  if (future)
    future->setError(std::make_exception_ptr(
        Error("the process is ending, and operation " + std::to_string(sequence_) + " is not complete")));
}

void ShmWork::poll(std::chrono::microseconds at_most) {
  if (auto* pending = first_pending()) shared_->core().poll(*pending, at_most);
}

}  // namespace lockstep::shm_engine
