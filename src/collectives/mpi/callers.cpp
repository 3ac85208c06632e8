#include "collectives/mpi/callers.h"

#include "base/error.h"

namespace lockstep::mpi_engine {

void Callers::require(const char* operation) const {
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
