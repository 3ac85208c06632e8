#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"
#include "collectives/shm/backend/backend_state.h"
#include "collectives/shm/backend/page_notes.h"
#include "collectives/shm/backend/tensor_request.h"

namespace lockstep::shm_engine {

/// c10d's Work for a TensorRequest: one or more of the core's Works, and the steps that follow them.
///
/// It is settled once, by the first thread that sees the core done: results computed elsewhere are copied back, and the
/// future is completed. The operation's timeout bounds all waiting.
class ShmWork final : public c10d::Work {
 public:
  /// `works` are those of the request's parts, which have been started. `shown` is on the rank's page; null: not shown.
  ShmWork(BackendStatePtr shared, TensorRequest request, std::vector<shm::WorkPtr> works,
          std::chrono::milliseconds timeout, uint64_t sequence, std::optional<PageNote> shown);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }

  // For the future thread.
  /// Returns true when the work is complete. The work fails when its time is up.
  bool complete_or_expire();
  /// Fails the future, which no thread will complete.
  void abandon_future();
  /// Makes progress, then sleeps until something happens or `at_most` has passed.
  void poll(std::chrono::microseconds at_most);

 private:
  shm::Work* first_pending() const;
  void wait_for_core(std::chrono::milliseconds timeout, Clock::time_point since = {});
  /// When isCompleted() was first called.
  Clock::time_point asked_since();
  void settle();

  // Constant after construction.
  const BackendStatePtr shared_;
  const std::chrono::milliseconds timeout_;
  const uint64_t sequence_;
  const std::optional<PageNote> shown_;
  const Clock::time_point started_ = Clock::now();
  const std::vector<shm::WorkPtr> works_;

  std::atomic<bool> settled_{false};
  std::atomic<Clock::rep> asked_since_{0};  ///< isCompleted() was first called then; 0: it has not been

  // Guarded by Work's mutex_.
  std::vector<std::function<void()>> finish_;  ///< on success, in order, before the work counts as complete
  std::vector<at::Tensor> result_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace lockstep::shm_engine
