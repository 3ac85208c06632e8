/* A program whose ranks add up one number, as soon as they can. Says how long after the time that its argument gives
 * (nanoseconds of the monotonic clock) rank 0 had the sum, how long its main() took until then, and the sum. */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#ifdef WITH_MPI
#include <mpi.h>
#else
#include <lockstep/c.h>
#endif

static long long now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (long long)time.tv_sec * 1000000000 + time.tv_nsec;
}

int main(int argc, char** argv) {
  const long long begun = now_ns(), started = argc > 1 ? atoll(argv[1]) : begun;
  float one = 1, sum = 0;
  int rank, size;
#ifdef WITH_MPI
  MPI_Init(&argc, &argv);
  MPI_Allreduce(&one, &sum, 1, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
  const long long done = now_ns();
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Finalize();
#else
  lockstep_group* world;
  if (lockstep_join(NULL, &world) != LOCKSTEP_OK ||
      lockstep_all_reduce(world, &one, &sum, 1, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL) != LOCKSTEP_OK) {
    fprintf(stderr, "first_sum: %s\n", lockstep_last_error());
    return 1;
  }
  const long long done = now_ns();
  rank = lockstep_rank(world);
  size = lockstep_size(world);
  lockstep_leave(world);
#endif
  if (rank == 0) printf("%.3f %.3f %g\n", (double)(done - started) / 1e6, (double)(done - begun) / 1e6, sum);
  return sum == (float)size ? 0 : 1;
}
