#pragma once

#include <condition_variable>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "collectives/hierarchical/progress.h"
#include "collectives/mpi/board.h"
#include "collectives/mpi/callers.h"
#include "collectives/mpi/message_queue.h"
#include "collectives/mpi/mover.h"
#include "collectives/mpi/notes.h"
#include "collectives/mpi/port.h"

namespace lockstep::mpi_engine {

/// Moves the messages of all groups of a program. If MPI allows calls from one thread only (MPI_THREAD_FUNNELED), the
/// other threads post messages, and that thread calls MPI for them whenever it starts, polls or waits for an operation
/// of any group. So all groups make progress together, and none waits for a thread that waits in another. If any thread
/// may call MPI, threads may also wait in shared memory, where they make no MPI calls, so the pump's own thread polls
/// from time to time while messages are in flight.
///
/// The pump also passes notes between all ranks, which make up the Board.
class Pump final : public hierarchical_engine::Progress {
 public:
  explicit Pump(std::unique_ptr<Port> port);
  ~Pump() override;
  Pump(const Pump&) = delete;

  int rank() const { return rank_; }
  int world_size() const { return world_size_; }
  int largest_tag() const { return largest_tag_; }

  bool is_up_to_this_thread() const override { return !port_->takes_any_thread() && callers_.may_call(); }
  void require(const char* operation) const override { callers_.require(operation); }
  bool poll() override;
  /// Polls, and reads the other ranks' notes from the board.
  void look_for_notes();
  void make(Clock::time_point since) override;

  /// Opens a communicator that lives as long as the pump: none is freed while another rank may still send.
  Port::Handle open(const std::vector<int>& ranks);

  /// Any thread may call.
  void post(const MessagePtr& message);
  /// Ends the message now, whatever its state. Any thread may call.
  void give_up(const MessagePtr& message);

  /// Writes to the board. Any thread may call; other ranks see it when they poll.
  void set(const std::string& key, const std::string& value) { tell_all(board_.set(key, value)); }
  void add(const std::string& key, int64_t amount) { tell_all(board_.add(key, amount)); }
  Board& board() { return board_; }

  /// Announces that this rank writes nothing more, and waits until all others have done so, or the timeout.
  /// Communicators are freed only afterwards: Open MPI delivers a message for a freed one to the next with its number.
  void say_farewell(std::chrono::milliseconds timeout) noexcept;
  /// Keeps every rank from freeing the groups' communicators. Messages that nobody receives may be in flight, and MPICH
  /// delivers those to the next communicator with the freed one's number.
  void keep_communicators();

 private:
  /// This rank's state: whether it writes on the board, and how far the others are.
  enum class Presence { kPresent, kSaidFarewell, kAllHaveLeft };

  void tell_all(const std::string& note);

  const std::unique_ptr<Port> port_;
  const int rank_, world_size_, largest_tag_;
  const Callers callers_;
  Board board_;

  Mutex mutex_;  ///< held during every call of MPI
  std::condition_variable moved_;
  MessageQueue messages_ LOCKSTEP_GUARDED_BY(mutex_);
  Notes notes_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Port::Handle> opened_ LOCKSTEP_GUARDED_BY(mutex_);
  Presence presence_ LOCKSTEP_GUARDED_BY(mutex_) = Presence::kPresent;
  int sleepers_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::unique_ptr<Mover> mover_;  ///< last: it polls; null if only one thread may call MPI
};

}  // namespace lockstep::mpi_engine
