#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "collectives/intra_op.h"
#include "collectives/shm/backend/future_thread.h"
#include "collectives/shm/protocol/communicator.h"

namespace lockstep::shm_engine {

/// State shared by a backend and its works: the core's part in the group, and the tensors that operations use.
/// Destroyed with the last of them. Tensors in its memory keep only that memory alive (Arena): if they kept the group,
/// pending operations, which keep tensors, would keep it forever. Any thread may use it.
class BackendState {
 public:
  explicit BackendState(shm::World world) : core_(std::move(world)) { core_.share_out_by(share_out); }

  shm::Communicator& core() { return core_; }
  FutureThread& futures() { return futures_; }

  /// Records that this rank was told of a failure, or that its wait was interrupted.
  void note_told() { told_ = true; }
  bool is_told() const { return told_; }

  /// Keeps tensors as long as the group's core may touch their memory. The core releases them while it holds its mutex,
  /// where freeing a tensor could wait for Python's lock. So they are only collected there, until free_released().
  std::shared_ptr<void> keep(std::vector<at::Tensor> tensors) {
    return std::make_shared<Kept>(std::move(tensors), released_);
  }
  /// Frees the tensors that the core has released.
  /// REQUIRES: the caller holds no lock.
  void free_released() { released_.free(); }

 private:
  class Released {
   public:
    void add(std::vector<at::Tensor>&& tensors) {
      const MutexLock lock(mutex_);
      for (auto& tensor : tensors) tensors_.push_back(std::move(tensor));
    }
    void free() {
      std::vector<at::Tensor> tensors;
      const MutexLock lock(mutex_);
      tensors.swap(tensors_);  // freed after the lock
    }

   private:
    Mutex mutex_;
    std::vector<at::Tensor> tensors_ LOCKSTEP_GUARDED_BY(mutex_);
  };
  struct Kept {
    Kept(std::vector<at::Tensor> tensors_, Released& released_) : tensors(std::move(tensors_)), released(released_) {}
    Kept(const Kept&) = delete;
    ~Kept() { released.add(std::move(tensors)); }
    std::vector<at::Tensor> tensors;
    Released& released;
  };

  /// Runs on the threads of LibTorch's operators, which belong to the calling thread and are idle meanwhile. A thread
  /// that completes futures would get other ones, in addition to those that compute.
  static void share_out(size_t parts, const std::function<void(size_t)>& run) {
    const auto some = [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) run(static_cast<size_t>(part));
    };
    const auto all = static_cast<int64_t>(parts);
    FutureThread::is_running_here() ? some(0, all) : intra_op_for(all, 1, some);
  }

  std::atomic<bool> told_{false};
  Released released_;  // outlives the core
  shm::Communicator core_;
  FutureThread futures_;  // destroyed first
};
using BackendStatePtr = std::shared_ptr<BackendState>;

}  // namespace lockstep::shm_engine
