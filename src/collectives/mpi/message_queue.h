#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collectives/mpi/port.h"

namespace lockstep::mpi_engine {

/// A message, from its posting to its end.
struct Message {
  enum class State : uint8_t { kPosted, kMoving, kArrived, kFailed };

  // Constant once it is posted.
  Port::Handle communicator = 0;
  void* data = nullptr;
  size_t bytes = 0;
  int peer = -1;
  int tag = 0;
  bool is_sent = false;
  std::shared_ptr<const void> keep;  ///< owns the memory, if an owner is needed

  std::atomic<State> state{State::kPosted};  ///< released when it ends
  std::atomic<bool> is_given_up{false};
  std::string error;  ///< of kFailed

  // Guarded by the pump's mutex.
  Port::Handle handle = 0;

  bool is_over() const { return state.load(std::memory_order_acquire) >= State::kArrived; }
};
using MessagePtr = std::shared_ptr<Message>;

/// Posted and moving messages. Guarded by the pump's mutex.
class MessageQueue {
 public:
  explicit MessageQueue(Port& port) : port_(port) {}

  /// Makes no MPI calls.
  void post(MessagePtr message) { posted_.push_back(std::move(message)); }
  /// Ends a message that has not been started, without MPI calls. Returns false if it has been started.
  bool take_back(const MessagePtr& message);

  /// Starts posted messages, and ends finished and abandoned ones. Returns whether there were any.
  bool move();
  bool is_moving() const { return !moving_.empty(); }
  bool is_sending(int tag) const;
  /// Abandons all moving messages.
  void give_up();

 private:
  void start(Message& message);
  /// Whether it is over.
  bool advance(Message& message);

  Port& port_;
  std::vector<MessagePtr> posted_, moving_;
};

/// Called between two polls by a thread that has waited since `since`. It yields at first, because the awaited rank may
/// need the core, and then sleeps, longer the longer it has waited.
void rest(Clock::time_point since);

}  // namespace lockstep::mpi_engine
