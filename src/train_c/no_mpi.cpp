#include "train_c/world.h"

namespace lockstep::train_c {

Context join_mpi(const void*, bool is_fortran, ContextOptions) {
  refuse(is_fortran ? "lockstep_train_join_mpi_f" : "lockstep_train_join_mpi",
         "this is liblockstep_train, which was built without MPI; link liblockstep_train_mpi instead");
}

}  // namespace lockstep::train_c
