/* The ranks of an MPI communicator that C names by the address of an MPI_Comm. */

#include <mpi.h>

#include "check.h"

int main(int argc, char** argv) {
  lockstep_train_world* world = NULL;
  MPI_Comm none = MPI_COMM_NULL, all = MPI_COMM_WORLD, reversed = MPI_COMM_NULL;
  int rank = 0, size = 0;
  REFUSED(LOCKSTEP_JOIN_FAILED, "MPI is not initialized", lockstep_train_join_mpi(&all, NULL, &world));
  CHECK(MPI_Init(&argc, &argv) == MPI_SUCCESS);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "communicator is null", lockstep_train_join_mpi(NULL, NULL, &world));
  REFUSED(LOCKSTEP_JOIN_FAILED, "MPI_COMM_NULL", lockstep_train_join_mpi(&none, NULL, &world));
  REFUSED(LOCKSTEP_JOIN_FAILED, "handle 123456789, is none of MPI",
          lockstep_train_join_mpi_f(123456789, NULL, &world));
  REFUSED(LOCKSTEP_JOIN_FAILED, "handle -7, is none of MPI", lockstep_train_join_mpi_f(-7, NULL, &world));
  MPI_Comm_rank(all, &rank);
  MPI_Comm_size(all, &size);
  MPI_Comm_split(all, 0, -rank, &reversed);
  OK(lockstep_train_join_mpi(&reversed, NULL, &world));
  CHECK(lockstep_train_rank(world) == size - 1 - rank && lockstep_train_size(world) == size);
  OK(lockstep_train_leave(world));
  CHECK(lockstep_train_rank(world) == -1);
  if (rank == 0) printf("done on %d ranks\n", size);
  MPI_Finalize();
  return 0;
}
