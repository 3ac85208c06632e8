#pragma once

#include <atomic>
#include <memory>
#include <string>

namespace lockstep::shm {

/// An operation that was started and can be waited for: a collective (Operation), a send or a receive (Message).
///
/// done() never blocks and makes no progress by itself (Communicator::progress and Communicator::wait do). Any thread
/// may ask.
class Work {
 public:
  virtual ~Work() = default;
  /// Acquires what succeed() or fail() released on the thread that made progress.
  bool done() const { return state_.load(std::memory_order_acquire) != State::kPending; }
  bool failed() const { return state_.load(std::memory_order_acquire) == State::kFailed; }
  /// Why; only after failed() said so.
  const std::string& error() const { return error_; }

 protected:
  friend class Pipeline;
  friend class Channels;
  void succeed() { state_.store(State::kSucceeded, std::memory_order_release); }
  void fail(std::string why) {
    error_ = std::move(why);
    state_.store(State::kFailed, std::memory_order_release);
  }

 private:
  enum class State : uint8_t { kPending, kSucceeded, kFailed };
  std::atomic<State> state_{State::kPending};
  std::string error_;
};
using WorkPtr = std::shared_ptr<Work>;

}  // namespace lockstep::shm
