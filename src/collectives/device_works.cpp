#include "collectives/device_works.h"

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <utility>

#include "collectives/cause.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

/// Why an operation that is over has failed; empty: it has not.
std::string failure_of(c10d::Work& work) {
  try {
    if (const std::exception_ptr failure = work.exception()) std::rethrow_exception(failure);
  } catch (const std::exception& cause) {
    return cause_of(cause);
  }
  return "";
}

}  // namespace

void DeviceWorks::add(One one) {
  constexpr std::chrono::milliseconds kPause{50};
  const MutexLock lock(mutex_);
  if (!thread_.is_ours())
    thread_.start(kPause, [this] {
      const MutexLock looking(mutex_);
      look();
      end_process_if_late();
      return true;
    });
  running_.push_back(std::move(one));
}

void DeviceWorks::look() {
  while (failure_.empty() && !running_.empty()) {
    const One& first = running_.front();
    std::string cause;
    if (first.work->isCompleted())
      cause = failure_of(*first.work);
    else if (Clock::now() < first.deadline)
      return;
    else
      cause = "the device has not done it in time";
    if (!cause.empty()) {
      failure_ = first.describe(cause);
      failed_at_ = Clock::now();
      has_failed_ = true;
    }
    running_.pop_front();
  }
}

void DeviceWorks::end_process_if_late() {
  if (failure_.empty() || is_told_ || Clock::now() - failed_at_ < kGrace) return;
  // The host may wait for the device forever. If the operation were ended instead, the host would go on with a result
  // that is none.
  own_page().fail(RankFailure::kPeer, -1, failure_);
  std::fprintf(stderr,
               "lockstep: %s\nThis process ends now: it waits for the device, where nothing can throw the error.\n",
               failure_.c_str());
  std::_Exit(EXIT_FAILURE);
}

std::string DeviceWorks::take_failure() {
  const MutexLock lock(mutex_);
  is_told_ = true;
  return failure_;
}

std::string DeviceWorks::finish(const Deadline& deadline) {
  constexpr std::chrono::milliseconds kNap{1};
  for (;; std::this_thread::sleep_for(kNap)) {
    const MutexLock lock(mutex_);
    look();
    is_told_ = is_told_ || !failure_.empty();
    if (!failure_.empty() || running_.empty()) return failure_;
    if (deadline.passed()) return running_.front().describe("the device has not done it when this rank left");
  }
}

void DeviceWorks::forget() {
  const MutexLock lock(mutex_);
  running_.clear();
  is_told_ = true;
}

}  // namespace lockstep
