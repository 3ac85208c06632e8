#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "base/mutex.h"

#include "base/error.h"

namespace lockstep {

/// Makes items 0 .. count - 1 on worker threads, ahead of the one thread that takes them, in order.
///
/// Workers claim the next number, make the item without the lock, and put it into slot `number % in_flight`. A number
/// may be claimed only while it is less than `in_flight` ahead of the consumer, so its slot is free by then. The order
/// of items therefore never depends on the workers' speed. An exception of `make` is put into the slot like an item and
/// thrown when its turn comes. Without workers, the consumer makes each item itself.
///
/// The destructor lets the workers finish their current items, and joins them.
template <typename Item>
class Prefetcher {
 public:
  using Make = std::function<Item(int64_t number)>;

  /// `make` is called on several workers at once.
  Prefetcher(int64_t count, int workers, int64_t in_flight, Make make)
      : count_(count),
        in_flight_(std::min(in_flight, count)),
        make_(std::move(make)),
        slots_(workers > 0 ? in_flight_ : 0) {
    try {
      for (int i = 0; i < workers && i < count; ++i) workers_.emplace_back([this] { run(); });
    } catch (...) {  // if a thread cannot start, earlier ones must not keep running
      stop();
      throw;
    }
  }
  ~Prefetcher() { stop(); }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  int64_t count() const { return count_; }
  int64_t taken() const {
    const MutexLock lock(mutex_);
    return taken_;
  }

  /// Item number taken().
  /// REQUIRES: not all items have been taken.
  Item take() {
    if (workers_.empty()) return make_(next());
    Slot slot;
    {
      MutexLock lock(mutex_);
      Slot& filled = slots_[taken_ % in_flight_];
      while (std::holds_alternative<std::monostate>(filled)) item_made_.wait(lock.native());
      slot = std::exchange(filled, std::monostate());
      ++taken_;
    }
    slot_freed_.notify_one();
    if (auto* error = std::get_if<std::exception_ptr>(&slot)) rethrow(*error);
    return std::get<Item>(std::move(slot));
  }

 private:
  using Slot = std::variant<std::monostate, Item, std::exception_ptr>;

  /// Without workers: the number of the item to make.
  int64_t next() {
    const MutexLock lock(mutex_);
    return taken_++;
  }

  void run() {
    MutexLock lock(mutex_);
    while (true) {
      while (!stopping_ && claimed_ != count_ && claimed_ >= taken_ + in_flight_) slot_freed_.wait(lock.native());
      if (stopping_ || claimed_ == count_) return;
      const int64_t number = claimed_++;
      lock.unlock();
      Slot made = make_slot(number);
      lock.lock();
      slots_[number % in_flight_] = std::move(made);
      item_made_.notify_one();
    }
  }

  Slot make_slot(int64_t number) {
    try {
      return Slot(std::in_place_type<Item>, make_(number));
    } catch (...) {
      return std::current_exception();
    }
  }

  void stop() {
    {
      const MutexLock lock(mutex_);
      stopping_ = true;
    }
    slot_freed_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
  }

  const int64_t count_;
  const int64_t in_flight_;
  const Make make_;

  mutable Mutex mutex_;
  std::condition_variable item_made_;
  std::condition_variable slot_freed_;
  std::vector<Slot> slots_ LOCKSTEP_GUARDED_BY(mutex_);
  int64_t claimed_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  int64_t taken_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool stopping_ LOCKSTEP_GUARDED_BY(mutex_) = false;

  std::vector<std::thread> workers_;  // the consumer's
};

/// Makes ATen's operators on this thread use only this thread from now on. Calling it again is cheap.
///
/// at::set_num_threads does not work here: every thread that starts to compute later adopts its number.
/// c10::ParallelGuard has no effect on operators. So this sets OpenMP's and MKL's numbers, which are per thread; it
/// does nothing for a LibTorch that was built without them.
void compute_on_this_thread_only();

}  // namespace lockstep
