#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <comms/torchcomms/TorchWork.hpp>

#include "base/clock.h"

namespace lockstep::torchcomms {

/// The error as torchcomms' own engines throw it: a std::runtime_error, without LibTorch's backtrace.
std::exception_ptr plain(const std::exception_ptr& error);

class EngineWork;

/// A work in the hands of other threads than its caller's. `ticket` is released last: its owner can see that no thread
/// will free tensors any more, which may take Python's lock.
struct Unsettled {
  std::shared_ptr<const void> ticket;
  c10::intrusive_ptr<EngineWork> work;
};

/// An asynchronous operation: one or more of the engine's works, which are settled once. Then the status changes and
/// the end hooks run, in wait() or, where nobody waits, on another thread (see settle_later()).
class EngineWork final : public torch::comms::TorchWork {
 public:
  using Works = std::vector<c10::intrusive_ptr<c10d::Work>>;
  /// `timeout` limits each wait. `on_failure` is called before the end hooks of an operation that failed.
  EngineWork(Works works, std::chrono::milliseconds timeout, std::function<void()> on_failure);

  void wait() override;
  void waitBlocking() override { finish(); }
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
  /// Settles the work when the engine has completed it. Does not wait.
  static void settle_when_done(Unsettled unsettled);

 private:
  void finish();
  void settle(std::exception_ptr error);

  const std::chrono::milliseconds timeout_;
  const std::function<void()> on_failure_;
  const Clock::time_point started_ = Clock::now();
  mutable std::recursive_mutex mutex_;  ///< held while hooks run, which may wait for this work
  Works works_;                         ///< guarded by mutex_; released, with their tensors, when the work is settled
  bool settled_ = false;                ///< guarded by mutex_
  std::exception_ptr error_;            ///< guarded by mutex_
};

/// Has a work settled that its caller may never wait for: DistributedDataParallel, for one, reads nothing but the
/// future that an end hook completes. torchcomms registers hooks, which are not thread-safe, right after the call that
/// starts an operation has returned; for a millisecond, therefore, only the caller settles the work.
void settle_later(Unsettled unsettled);

}  // namespace lockstep::torchcomms
