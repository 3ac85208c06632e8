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

  bool is_up_to_this_thread() const override { return !port_->takes_any_thread() && callers_.may_call(); }
  void require(const char* operation) const override { callers_.require(operation); }
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
  /// Of this rank: whether it writes on the board, and how far the others have come.
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
  std::unique_ptr<Mover> mover_;  ///< last: it polls; null where only one thread may call MPI
};

}  // namespace lockstep::mpi_engine
