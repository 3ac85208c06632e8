#pragma once

#include <string>
#include <thread>

#include "base/shared_segment.h"
#include "collectives/mpi/port.h"

namespace lockstep::mpi_engine {

/// Which threads may call MPI: those of the process that has initialized it, until it is finalized; if MPI takes calls
/// from one thread only, the one that made this object. Any thread.
class Callers {
 public:
  Callers(const Port& port, int rank) : port_(port), rank_(rank) {}

  /// Whether this thread may.
  bool may_call() const {
    return !is_forked() && !port_.is_over() && (port_.takes_any_thread() || std::this_thread::get_id() == owner_);
  }
  /// Throws Error if this thread may not.
  void require(const char* operation) const;
  /// This process is a child of the one that has initialized MPI, and has none of its threads.
  bool is_forked() const { return fork_generation_ != fork_generation(); }

 private:
  const Port& port_;
  const int rank_;
  const std::thread::id owner_ = std::this_thread::get_id();
  const unsigned fork_generation_ = fork_generation();
};

}  // namespace lockstep::mpi_engine
