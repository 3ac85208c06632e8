#include <utility>

#include <lockstep/mpi.h>

#include "train_c/world.h"

namespace lockstep::train_c {

Context join_mpi(const void* communicator, bool is_fortran, ContextOptions options) {
  // Before MPI_Init() a Fortran handle cannot be converted.
  int is_initialized = 0;
  MPI_Initialized(&is_initialized);
  if (is_initialized == 0) throw Error("MPI is not initialized; call MPI_Init before you join its ranks");
  const MPI_Comm ranks = is_fortran ? MPI_Comm_f2c(*static_cast<const MPI_Fint*>(communicator))
                                    : *static_cast<const MPI_Comm*>(communicator);
  if (ranks == MPI_COMM_NULL) throw Error("the communicator is MPI_COMM_NULL; give one that this rank belongs to");
  return mpi_context(ranks, std::move(options));
}

}  // namespace lockstep::train_c
