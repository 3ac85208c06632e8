#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collectives/mpi/port.h"

namespace lockstep::mpi_engine {

/// A message from when it is posted until it is over.
struct Message {
  enum class State : uint8_t { kPosted, kMoving, kArrived, kFailed };

  // Constant once it is posted.
  Port::Handle communicator = 0;
  void* data = nullptr;
  size_t bytes = 0;
  int peer = -1;
  int tag = 0;
  bool is_sent = false;
  std::shared_ptr<const void> keep;  ///< owns the memory, where somebody does

  std::atomic<State> state{State::kPosted};  ///< released when it ends
  std::atomic<bool> is_given_up{false};
  std::string error;  ///< of kFailed

  // Guarded by the pump's mutex.
  Port::Handle handle = 0;

  bool is_over() const { return state.load(std::memory_order_acquire) >= State::kArrived; }
};
using MessagePtr = std::shared_ptr<Message>;

/// The messages that are posted and those that move. Guarded by the pump's mutex.
class MessageQueue {
 public:
  explicit MessageQueue(Port& port) : port_(port) {}

  /// Calls no MPI.
  void post(MessagePtr message) { posted_.push_back(std::move(message)); }
  /// Ends a message that has not been started, without MPI; false: it has been.
  bool take_back(const MessagePtr& message);

  /// Starts what was posted, and ends what is over or given up. Whether there was any.
  bool move();
  bool is_moving() const { return !moving_.empty(); }
  /// Whether a message with this tag is on its way to another rank.
  bool is_sending(int tag) const;
  /// Gives up all that move.
  void give_up();

 private:
  void start(Message& message);
  /// Whether it is over.
  bool advance(Message& message);

  Port& port_;
  std::vector<MessagePtr> posted_, moving_;
};

/// Between two polls of a thread that waits since then: it yields at first, because the rank that it waits for may need
/// the core, and then sleeps, longer the longer it has waited.
void rest(Clock::time_point since);

}  // namespace lockstep::mpi_engine
