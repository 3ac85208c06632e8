#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/shared_segment.h"
#include "collectives/hierarchical/progress.h"
#include "collectives/mpi/board.h"
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

/// Moves the messages of all groups of a program. MPI may allow calls from one thread only (MPI_THREAD_FUNNELED): then
/// the others post messages, and that thread calls MPI for them whenever it starts, polls or waits for an operation of
/// any group. So groups make progress together, and none waits for a thread that waits in another. Where any thread may
/// call MPI, threads may also wait in shared memory, where they call nothing: so a thread of the pump's polls now and
/// then while messages are under way.
///
/// It also passes notes between all ranks, which make up the Board.
class Pump final : public hierarchical_engine::Progress {
 public:
  explicit Pump(std::unique_ptr<Port> port);
  ~Pump() override;
  Pump(const Pump&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int largest_tag() const { return largest_tag_; }

  bool is_up_to_this_thread() const override { return !port_->takes_any_thread() && may(); }
  void require(const char* operation) const override;
  bool poll() override;
  /// Polls, and takes in what other ranks have written on the board.
  void look_for_notes();
  void make(Clock::time_point since) override;

  /// A communicator for as long as there is a pump: while another rank may still send, none is freed.
  Port::Handle open(const std::vector<int>& ranks);

  /// Any thread.
  void post(const MessagePtr& message);
  /// Ends it now, whatever it has reached. Any thread.
  void give_up(const MessagePtr& message);

  /// Any thread; the others learn of it when they poll.
  void set(const std::string& key, const std::string& value) { tell_all(board_.set(key, value)); }
  void add(const std::string& key, int64_t amount) { tell_all(board_.add(key, amount)); }
  Board& board() { return board_; }

  /// This rank writes nothing more. Waits until all others have said so, or the time is over. Only after that are
  /// communicators freed: Open MPI hands a message for one that is gone to the next one with its number.
  void say_farewell(std::chrono::milliseconds timeout) noexcept;
  /// No rank frees the communicators of groups: messages may be under way that nobody receives, and MPICH hands those
  /// to the next communicator with the number of the one that is gone.
  void keep_communicators();

 private:
  /// Whether this thread may call MPI.
  bool may() const;
  void tell_all(const std::string& note);
  void start(Message& message) LOCKSTEP_REQUIRES(mutex_);
  /// Whether it is over.
  bool advance(Message& message) LOCKSTEP_REQUIRES(mutex_);
  bool read_notes() LOCKSTEP_REQUIRES(mutex_);
  static void end(Message& message, const std::string& error);
  void keep_moving();

  const std::unique_ptr<Port> port_;
  const int rank_, world_size_, largest_tag_;
  const std::thread::id owner_ = std::this_thread::get_id();
  const unsigned fork_generation_ = fork_generation();
  Board board_;

  Mutex mutex_;  ///< held during every call of MPI
  std::condition_variable moved_;
  std::condition_variable started_;  ///< a message moves while nothing did, or the pump ends
  std::vector<MessagePtr> posted_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<MessagePtr> moving_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Port::Handle> opened_ LOCKSTEP_GUARDED_BY(mutex_);
  bool said_farewell_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool all_have_left_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  int sleepers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  unsigned polls_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  bool ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::thread mover_;  ///< runs keep_moving(), if any thread may call MPI
};

}  // namespace lockstep::mpi_engine
