#include <utility>

#include <lockstep/mpi.h>

#include "train_c/world.h"

namespace lockstep::train_c {
namespace {

/// While it exists, a call of MPI with a handle that is none returns an error, which would end the process by default.
/// MPI reports such an error to MPI_COMM_SELF or, before MPI 4, to MPI_COMM_WORLD.
class ReturnedErrors {
 public:
  ReturnedErrors() {
    for (size_t i = 0; i < 2; ++i) {
      MPI_Comm_get_errhandler(kOf[i], &handlers_[i]);
      MPI_Comm_set_errhandler(kOf[i], MPI_ERRORS_RETURN);
    }
  }
  ~ReturnedErrors() {
    for (size_t i = 0; i < 2; ++i) {
      MPI_Comm_set_errhandler(kOf[i], handlers_[i]);
      MPI_Errhandler_free(&handlers_[i]);
    }
  }
  ReturnedErrors(const ReturnedErrors&) = delete;

 private:
  const MPI_Comm kOf[2]{MPI_COMM_WORLD, MPI_COMM_SELF};
  MPI_Errhandler handlers_[2]{};
};

bool is_communicator(MPI_Comm ranks) {
  const ReturnedErrors returned;
  int size = 0;
  return MPI_Comm_size(ranks, &size) == MPI_SUCCESS;
}

}  // namespace

Context join_mpi(const void* communicator, bool is_fortran, ContextOptions options) {
  // Before MPI_Init() a Fortran handle cannot be converted.
  int is_initialized = 0, is_finalized = 0;
  MPI_Initialized(&is_initialized);
  MPI_Finalized(&is_finalized);
  if (is_initialized == 0) throw Error("MPI is not initialized; call MPI_Init before you join its ranks");
  const MPI_Comm ranks = is_fortran ? MPI_Comm_f2c(*static_cast<const MPI_Fint*>(communicator))
                                    : *static_cast<const MPI_Comm*>(communicator);
  if (ranks == MPI_COMM_NULL) throw Error("the communicator is MPI_COMM_NULL; give one that this rank belongs to");
  if (is_finalized == 0 && !is_communicator(ranks))
    throw Error("the communicator" +
                (is_fortran ? ", handle " + std::to_string(*static_cast<const MPI_Fint*>(communicator)) + "," : "") +
                " is none of MPI; give " +
                (is_fortran ? "MPI_COMM_WORLD, comm%MPI_VAL of mpi_f08, or another of the program's"
                            : "the address of an MPI_Comm") +
                " that was not freed");
  return mpi_context(ranks, std::move(options));
}

}  // namespace lockstep::train_c
