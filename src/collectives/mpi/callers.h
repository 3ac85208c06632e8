#pragma once

#include <string>
#include <thread>

#include "base/shared_segment.h"
#include "collectives/mpi/port.h"

namespace lockstep::mpi_engine {

/// The threads that may call MPI: those of the process that initialized it, until it is finalized; if MPI allows one
/// thread only, the thread that made this object. Any thread may use it.
class Callers {
 public:
  Callers(const Port& port, int rank) : port_(port), rank_(rank) {}

  bool may_call() const {
    return !is_forked() && !port_.is_over() && (port_.takes_any_thread() || std::this_thread::get_id() == owner_);
  }
  /// Throws Error if this thread may not.
  void require(const char* operation) const;
  /// Whether this process is a forked child of the one that initialized MPI, without its threads.
  bool is_forked() const { return fork_generation_ != fork_generation(); }

 private:
  const Port& port_;
  const int rank_;
  const std::thread::id owner_ = std::this_thread::get_id();
  const unsigned fork_generation_ = fork_generation();
};

}  // namespace lockstep::mpi_engine
