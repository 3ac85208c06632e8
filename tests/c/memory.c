/* Memory that requests use, and that is freed, or whose group is left, before they are done. */
#include <pthread.h>

#include "check.h"

enum { kCount = 1 << 20, kGo = 77 };

/* Rank 0 lets the others begin. */
static void go(lockstep_group* world) {
  int8_t word = 1;
  int rank;
  if (lockstep_rank(world) != 0)
    OK(lockstep_recv(world, &word, 1, LOCKSTEP_INT8, 0, kGo, NULL, NULL));
  else
    for (rank = 1; rank < lockstep_size(world); ++rank) OK(lockstep_send(world, &word, 1, LOCKSTEP_INT8, rank, kGo, NULL));
}

static void fill(float* values, int rank) {
  int64_t i;
  for (i = 0; i < kCount; ++i) values[i] = (float)(rank + 1);
}

static void check_sum(const float* values, int size) {
  int64_t i;
  for (i = 0; i < kCount; ++i) CHECK(values[i] == (float)(size * (size + 1) / 2));
}

#define BUSY(words, group, memory) \
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, words ", which is not done; call lockstep_wait()", lockstep_free(group, memory))

static void collective(lockstep_group* world, lockstep_group* part) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  lockstep_request* request = NULL;
  void *memory = NULL, *other = NULL;
  OK(lockstep_allocate(part, kCount * sizeof(float), &memory));
  OK(lockstep_allocate(part, 64, &other));
  fill(memory, rank);
  if (rank != 0) go(world);
  OK(lockstep_all_reduce(part, memory, memory, kCount, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, &request));
  if (rank == 0) {
    BUSY("used by lockstep_all_reduce of 1048576 elements of float32", part, memory);
    OK(lockstep_free(part, other)); /* nothing uses it */
    go(world);
  }
  OK(lockstep_wait(&request, -1));
  check_sum(memory, size);
  OK(lockstep_free(part, memory));
  if (rank != 0) OK(lockstep_free(part, other));
}

/* A message into the middle of memory, and out of it. */
static void message(lockstep_group* world, lockstep_group* part) {
  const int rank = lockstep_rank(world);
  lockstep_request* request = NULL;
  void* memory = NULL;
  int32_t* values;
  int64_t i;
  int done = 0;
  OK(lockstep_allocate(part, 2 * kCount * sizeof(int32_t), &memory));
  values = memory;
  for (i = 0; i < 2 * kCount; ++i) values[i] = rank + 5;
  if (rank == 0) {
    OK(lockstep_recv(part, values + 7, kCount, LOCKSTEP_INT32, 1, 3, NULL, &request));
    BUSY("used by lockstep_recv of 1048576 elements of int32", part, memory);
    go(world);
    while (!done) OK(lockstep_test(request, &done));
    CHECK(values[6] == 5 && values[7] == 6 && values[kCount + 6] == 6 && values[kCount + 7] == 5);
    OK(lockstep_free(part, memory)); /* it is done, though not yet waited for */
    OK(lockstep_wait(&request, -1));
    return;
  }
  go(world);
  if (rank == 1) {
    OK(lockstep_send(part, values, kCount, LOCKSTEP_INT32, 0, 3, &request));
    OK(lockstep_wait(&request, -1));
  }
  OK(lockstep_free(part, memory));
}

static void* wait_for(void* request) {
  lockstep_request* waited = request;
  OK(lockstep_wait(&waited, -1));
  return NULL;
}

/* While another thread waits, the memory is still in use. */
static void waited_for_by_a_thread(lockstep_group* world, lockstep_group* part) {
  const int rank = lockstep_rank(world);
  lockstep_request *request = NULL, *copy;
  pthread_t thread;
  void* memory = NULL;
  int64_t word = 9;
  if (rank == 0) {
    OK(lockstep_allocate(world, sizeof word, &memory));
    OK(lockstep_recv(part, memory, 1, LOCKSTEP_INT64, 1, 4, NULL, &request));
    copy = request;
    CHECK(pthread_create(&thread, NULL, wait_for, request) == 0);
    BUSY("used by lockstep_recv of 1 element of int64", world, memory); /* memory of another group */
    go(world);
    CHECK(pthread_join(thread, NULL) == 0);
    REFUSED(LOCKSTEP_INVALID_ARGUMENT, "already been waited for", lockstep_wait(&copy, -1));
    CHECK(*(int64_t*)memory == 9);
    OK(lockstep_free(world, memory));
    return;
  }
  go(world);
  if (rank == 1) OK(lockstep_send(part, &word, 1, LOCKSTEP_INT64, 0, 4, NULL));
}

/* Memory of all ranks: the rank whose request uses it is told; the others wait for it. */
static void together(lockstep_group* world, lockstep_group* part) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  lockstep_request* request = NULL;
  void* memory = NULL;
  int64_t word = 11;
  OK(lockstep_allocate_together(world, 4096, &memory));
  if (rank == 0) {
    OK(lockstep_recv(part, memory, 1, LOCKSTEP_INT64, size - 1, 5, NULL, &request));
    BUSY("used by lockstep_recv of 1 element of int64", world, memory);
  }
  go(world);
  if (rank == size - 1) OK(lockstep_send(part, &word, 1, LOCKSTEP_INT64, 0, 5, NULL));
  if (rank == 0) OK(lockstep_wait(&request, -1));
  OK(lockstep_barrier(world, NULL));
  CHECK(*(int64_t*)memory == 11);
  OK(lockstep_free(world, memory));
}

/* A group that is left frees its memory, once no request of another group uses it. */
static void left(lockstep_group* world) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  lockstep_group *owner = NULL, *user = NULL;
  lockstep_request* request = NULL;
  void *memory = NULL, *result = NULL;
  OK(lockstep_split(world, 0, 0, &owner));
  OK(lockstep_split(world, 0, 0, &user));
  OK(lockstep_allocate(owner, kCount * sizeof(float), &memory));
  OK(lockstep_allocate(user, kCount * sizeof(float), &result));
  fill(memory, rank);
  if (rank != 0) go(world);
  OK(lockstep_all_reduce(user, memory, result, kCount, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, &request));
  OK(lockstep_leave(owner));
  if (rank == 0) go(world);
  OK(lockstep_wait(&request, -1));
  check_sum(result, size);
  OK(lockstep_leave(user)); /* frees the result */
}

void test_busy_memory(lockstep_group* world) {
  lockstep_group* part = NULL;
  OK(lockstep_split(world, 0, 0, &part));
  collective(world, part);
  message(world, part);
  waited_for_by_a_thread(world, part);
  together(world, part);
  left(world);
  OK(lockstep_leave(part));
  OK(lockstep_barrier(world, NULL));
}
