#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include "collectives/shm/backend/future_thread.h"
#include "collectives/shm/group.h"

namespace lockstep::shm_engine {

/// A group and what its operations leave behind. Shared by the backend and its works: it goes when the last of them
/// goes. Tensors in its memory keep that memory alone (Arena), since what is pending here keeps tensors. Any thread may
/// use it.
class SharedGroup {
 public:
  /// `keeps_page`: its operations are those that this rank's page tells of.
  explicit SharedGroup(shm::World world, bool keeps_page = false) : keeps_page_(keeps_page), group_(std::move(world)) {}

  bool keeps_page() const { return keeps_page_; }
  shm::Group& group() { return group_; }
  FutureThread& futures() { return futures_; }

  /// Keeps tensors as long as the group's core may touch their memory. The core lets go of them while it holds its
  /// mutex, where freeing a tensor could wait for Python's lock; so they are only set aside then, until bury().
  std::shared_ptr<void> keep(std::vector<at::Tensor> tensors) {
    return std::make_shared<Kept>(std::move(tensors), graves_);
  }
  /// Frees what was set aside. Not to be called while holding a lock.
  void bury() { graves_.empty(); }

 private:
  class Graves {
   public:
    void add(std::vector<at::Tensor>&& tensors) {
      std::lock_guard lock(mutex_);
      for (auto& tensor : tensors) tensors_.push_back(std::move(tensor));
    }
    void empty() {
      std::vector<at::Tensor> tensors;
      std::lock_guard lock(mutex_);
      tensors.swap(tensors_);  // freed after the lock
    }

   private:
    std::mutex mutex_;
    std::vector<at::Tensor> tensors_;  // guarded by mutex_
  };
  struct Kept {
    Kept(std::vector<at::Tensor> tensors_, Graves& graves_) : tensors(std::move(tensors_)), graves(graves_) {}
    Kept(const Kept&) = delete;
    ~Kept() { graves.add(std::move(tensors)); }
    std::vector<at::Tensor> tensors;
    Graves& graves;
  };

  const bool keeps_page_;
  Graves graves_;  // outlives the group
  shm::Group group_;
  FutureThread futures_;  // goes first
};
using SharedGroupPtr = std::shared_ptr<SharedGroup>;

}  // namespace lockstep::shm_engine
