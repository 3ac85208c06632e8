#pragma once

#include <string>
#include <thread>

#include "base/error.h"
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

inline void Callers::require(const char* operation) const {
  if (may_call()) return;
  if (port_.is_over())
    throw Error(std::string(operation) + " on rank " + std::to_string(rank_) +
                ": MPI has been finalized; let the Context's scope end before MPI_Finalize()");
  throw Error(std::string(operation) + " on rank " + std::to_string(rank_) + " was called by a thread that must not " +
              "call MPI: the program initialized MPI with " + port_.thread_level() +
              ", so only the thread that made the Context may communicate. Call it there, or initialize MPI with "
              "MPI_Init_thread(..., MPI_THREAD_MULTIPLE, ...)");
}

}  // namespace lockstep::mpi_engine
