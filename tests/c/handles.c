/* Handles that are used after their end, and memory that overlaps: refused, where the program crashed or computed
 * something else. */
#include "check.h"

void test_handles(lockstep_group* world) {
  enum { kRequests = 10000 };
  const int size = lockstep_size(world);
  lockstep_group *part = NULL, *again;
  lockstep_request *request = NULL, *copy, *stale;
  int32_t values[3] = {1, 2, 3};
  int i, done;
  void* memory;
  OK(lockstep_split(world, 0, 0, &part));
  OK(lockstep_all_reduce(part, values, values, 3, LOCKSTEP_INT32, LOCKSTEP_SUM, &request));
  copy = request;
  OK(lockstep_wait(&request, -1));
  CHECK(request == NULL && values[2] == 3 * size);
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "the request is null", lockstep_wait(&request, -1));
  request = copy;
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "already been waited for", lockstep_wait(&request, -1));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "already been waited for", lockstep_test(copy, &done));
  for (i = 0; i < kRequests; ++i) { /* however many come later, none has the handle of an earlier one */
    values[0] = 1;
    OK(lockstep_all_reduce(part, values, values, 1, LOCKSTEP_INT32, LOCKSTEP_SUM, &request));
    CHECK(request != copy);
    stale = copy;
    REFUSED(LOCKSTEP_INVALID_ARGUMENT, "already been waited for", lockstep_wait(&stale, -1));
    OK(lockstep_wait(&request, -1));
    CHECK(values[0] == size);
  }
  again = part;
  OK(lockstep_leave(part));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "already left the group", lockstep_leave(again));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "lockstep_barrier: this rank has left the group", lockstep_barrier(again, NULL));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has left the group", lockstep_split(again, 0, 0, &part));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has left the group", lockstep_abort(again, "why"));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has left the group", lockstep_allocate(again, 64, &memory));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "has left the group", lockstep_free(again, values));
  CHECK(lockstep_rank(again) == -1 && lockstep_size(again) == -1);
  OK(lockstep_barrier(world, NULL));
}

#define OVERLAP(call) REFUSED(LOCKSTEP_INVALID_ARGUMENT, "overlap", call)

void test_overlaps(lockstep_group* world) {
  enum { kCount = 5, kMost = 8 };
  int32_t memory[(kMost + 1) * kCount];
  int64_t counts[kMost];
  const int rank = lockstep_rank(world), size = lockstep_size(world), next = (rank + 1) % size;
  int r;
  CHECK(size >= 2 && size <= kMost);
  for (r = 0; r < size; ++r) counts[r] = kCount;
  for (r = 0; r < (kMost + 1) * kCount; ++r) memory[r] = rank + 1;
  OVERLAP(lockstep_all_to_all(world, memory, memory, kCount, LOCKSTEP_INT32, NULL));
  OVERLAP(lockstep_all_to_all(world, memory, memory + 1, kCount, LOCKSTEP_INT32, NULL));
  OVERLAP(lockstep_all_to_all_v(world, memory, counts, memory + 1, counts, LOCKSTEP_INT32, NULL));
  OVERLAP(lockstep_all_gather(world, memory + next * kCount, memory, kCount, LOCKSTEP_INT32, NULL));
  OVERLAP(lockstep_all_gather(world, memory + 1 + rank * kCount, memory, kCount, LOCKSTEP_INT32, NULL));
  OVERLAP(lockstep_all_reduce(world, memory, memory + 1, kCount, LOCKSTEP_INT32, LOCKSTEP_SUM, NULL));
  OVERLAP(lockstep_reduce_scatter(world, memory, memory + next * kCount, kCount, LOCKSTEP_INT32, LOCKSTEP_SUM, NULL));
  if (rank == 0) OVERLAP(lockstep_gather(world, memory + kCount, memory, kCount, LOCKSTEP_INT32, 0, NULL));
  if (rank == 0) OVERLAP(lockstep_scatter(world, memory, memory + kCount, kCount, LOCKSTEP_INT32, 0, NULL));
  /* A rank's own block may be in place, and nothing was sent before. */
  OK(lockstep_all_gather(world, memory + rank * kCount, memory, kCount, LOCKSTEP_INT32, NULL));
  for (r = 0; r < size; ++r) CHECK(memory[r * kCount] == r + 1 && memory[(r + 1) * kCount - 1] == r + 1);
}
