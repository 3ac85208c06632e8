#include "collectives/gloo/pending_works.h"

#include <thread>
#include <utility>

#include "collectives/cause.h"

namespace lockstep::gloo_engine {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kPause{5}, kBetweenLooks{400};
constexpr milliseconds kOthers{500};  ///< for the others to report a failure, too

}  // namespace

void PendingWorks::forget_succeeded() {
  while (!works_.empty() && works_.front().work->isCompleted() && works_.front().work->isSuccess()) works_.pop_front();
}

void PendingWorks::add(Entry entry, WorkPtr work) {
  const MutexLock lock(mutex_);
  forget_succeeded();
  works_.push_back({std::move(entry), std::move(work)});
}

void PendingWorks::forget(uint64_t number) {
  const MutexLock lock(mutex_);
  std::erase_if(works_, [number](const One& one) { return one.entry.number == number; });
}

std::optional<PendingWorks::One> PendingWorks::front() {
  const MutexLock lock(mutex_);
  forget_succeeded();
  return works_.empty() ? std::nullopt : std::optional(works_.front());
}

uint64_t PendingWorks::first() {
  const auto one = front();
  return one ? one->entry.number : 0;
}

std::string PendingWorks::finish(FlightRecorder& recorder, const Deadline& deadline) {
  for (auto next_look = Clock::now() + kBetweenLooks;;) {
    const auto one = front();
    if (!one) return "";
    if (one->work->isCompleted()) {
      const std::string cause = failure_of([&] { one->work->wait(); });
      if (!cause.empty()) return recorder.explain(cause, one->entry, kOthers);
      continue;
    }
    if (std::string why = recorder.interruption(); !why.empty()) return why;
    if (deadline.passed())
      return "operation " + std::to_string(one->entry.number) + ", " + one->entry.shown() +
             ", is not done: not all ranks have called it";
    if (Clock::now() >= next_look) {
      if (std::string why = recorder.compare(one->entry); !why.empty()) return why;
      next_look = Clock::now() + kBetweenLooks;
    }
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace lockstep::gloo_engine
