/* Groups that ranks use in different orders, and programs that only look like that. */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

enum { kLateMs = 3300 }; /* longer than a deadlock is borne */

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void sleep_ms(int ms) {
  struct timespec pause;
  pause.tv_sec = ms / 1000;
  pause.tv_nsec = ms % 1000 * 1000000L;
  CHECK(nanosleep(&pause, NULL) == 0);
}

static lockstep_status sum(lockstep_group* group, int64_t count) {
  static float data[1000];
  return lockstep_all_reduce(group, data, data, count, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL);
}

/* The call is refused soon, with all these words. */
static void refused_soon(lockstep_status status, double start, const char* const* words) {
  CHECK(status == LOCKSTEP_MISMATCH);
  CHECK(now() - start < 5);
  CHECK(strstr(lockstep_last_error(), "the ranks wait for each other, so none can go on: rank 0 in ") != NULL);
  CHECK(strstr(lockstep_last_error(), "Every rank must use its groups in the same order") != NULL);
  for (; *words != NULL; ++words) CHECK(strstr(lockstep_last_error(), *words) != NULL);
}

static void leave_both(lockstep_group* first, lockstep_group* second) {
  OK(lockstep_leave(first));
  OK(lockstep_leave(second));
}

/* Rank 0 uses two groups of all ranks in the other order. */
static void two_parts(lockstep_group* world) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  static const char* const kTwo[] = {"rank 0 in operation 2, all_reduce(float32, 4 elements, sum), in subgroup ",
                                     " (ranks 0, 1); rank 1 in operation 2, all_reduce(float32, 5 elements, sum), in subgroup ",
                                     NULL};
  static const char* const kThree[] = {"rank 0 in operation 2, all_reduce(float32, 4 elements, sum), in subgroup ",
                                       " (ranks 0-2); ranks 1, 2 in operation 2, all_reduce(float32, 5 elements, sum), in ",
                                       NULL};
  lockstep_group *a = NULL, *b = NULL;
  double start;
  OK(lockstep_split(world, 0, 0, &a));
  OK(lockstep_split(world, 0, 0, &b));
  OK(sum(a, 4));
  OK(sum(b, 4));
  start = now();
  refused_soon(rank == 0 ? sum(a, 4) : sum(b, 5), start, size == 2 ? kTwo : kThree);
  CHECK(sum(a, 4) == LOCKSTEP_MISMATCH && sum(b, 4) == LOCKSTEP_MISMATCH); /* they have ended */
  leave_both(a, b);
  OK(sum(world, 10)); /* another group has not */
}

/* The world, and a part of two ranks; one waits for a message. */
static void message_and_collective(lockstep_group* world) {
  const int rank = lockstep_rank(world);
  static const char* const kWords[] = {"rank 0 in a recv from rank 1 with tag 8, in subgroup ", "rank 1 in operation 1, ", NULL};
  lockstep_group *a = NULL, *b = NULL;
  double start = now();
  OK(lockstep_split(world, 0, -rank, &a)); /* the ranks of the part have other numbers */
  OK(lockstep_split(world, rank < 2 ? 0 : -1, 0, &b));
  start = now();
  if (rank == 0) {
    float x;
    refused_soon(lockstep_recv(a, &x, 1, LOCKSTEP_FLOAT32, lockstep_size(world) - 2, 8, NULL, NULL), start, kWords);
  } else if (rank == 1) {
    refused_soon(lockstep_barrier(b, NULL), start, kWords);
  } else {
    sleep_ms(kLateMs); /* if it waited for them, it would be told, too */
  }
  if (rank < 2) OK(lockstep_leave(b));
  OK(lockstep_leave(a));
  OK(sum(world, 10));
}

/* Rank r begins with the group of itself and the next rank. */
static void ring(lockstep_group* world) {
  static const char* const kWords[] = {"(ranks 0, 1); rank 1 in operation 1, all_reduce(float32, 9 elements, sum), in subgroup ",
                                       "(ranks 1, 2); rank 2 in operation 1, all_reduce(float32, 9 elements, sum), in subgroup ",
                                       "(ranks 0, 2). ", NULL};
  const int rank = lockstep_rank(world);
  lockstep_group* pairs[3];
  double start;
  int i;
  if (lockstep_size(world) != 3) return;
  for (i = 0; i < 3; ++i) OK(lockstep_split(world, rank == i || rank == (i + 1) % 3 ? 0 : -1, 0, &pairs[i]));
  start = now();
  refused_soon(sum(pairs[rank], 9), start, kWords);
  for (i = 0; i < 3; ++i) OK(lockstep_leave(pairs[i]));
  OK(sum(world, 10));
}

void test_group_order(lockstep_group* world) {
  two_parts(world);
  message_and_collective(world);
  ring(world);
}

/* ---- What only looks like that. ---- */

/* The last rank waits for the one before, and so on; rank 0 is late. */
static void row(lockstep_group* world) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  lockstep_group* pairs[3];
  int i;
  for (i = 0; i + 1 < size; ++i) OK(lockstep_split(world, rank == i || rank == i + 1 ? 0 : -1, 0, &pairs[i]));
  if (rank == 0) sleep_ms(kLateMs);
  if (rank > 0) OK(sum(pairs[rank - 1], 4));
  if (rank + 1 < size) OK(sum(pairs[rank], 4));
  for (i = 0; i + 1 < size; ++i) OK(lockstep_leave(pairs[i]));
}

/* Each rank starts one operation, and waits for the other one first; rank 1 only polls, and comes late. */
static void crossed(lockstep_group* a, lockstep_group* b, int rank) {
  float x[4] = {1, 2, 3, 4};
  lockstep_request* request = NULL;
  lockstep_group *mine = rank == 0 ? a : b, *other = rank == 0 ? b : a;
  const double start = now();
  int done = 0;
  OK(lockstep_all_reduce(mine, x, x, 4, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, &request));
  while (rank == 1 && now() - start < kLateMs / 1e3) {
    OK(lockstep_test(request, &done));
    sleep_ms(1);
  }
  OK(sum(other, 4));
  OK(lockstep_wait(&request, -1));
}

static void* come_late(void* group) {
  sleep_ms(kLateMs);
  OK(sum(group, 4));
  return NULL;
}

/* Rank 0 waits in one group while a thread of its own, which has called none, comes late to the other. */
static void helper(lockstep_group* a, lockstep_group* b, int rank) {
  pthread_t thread;
  if (rank == 0)
    CHECK(pthread_create(&thread, NULL, come_late, b) == 0);
  else
    OK(sum(b, 4));
  OK(sum(a, 5));
  if (rank == 0) CHECK(pthread_join(thread, NULL) == 0);
}

/* Rank 0 is stopped while it waits for a message. Rank 1 sends it, which needs nobody, and waits for rank 0. */
static void stopped(lockstep_group* a, lockstep_group* b, int rank) {
  int64_t pid = (int64_t)getpid(), word = 7;
  if (rank == 0) {
    OK(lockstep_send(a, &pid, 1, LOCKSTEP_INT64, 1, 1, NULL));
    OK(lockstep_recv(a, &word, 1, LOCKSTEP_INT64, 1, 2, NULL, NULL));
  } else if (rank == 1) {
    pid_t child;
    OK(lockstep_recv(a, &pid, 1, LOCKSTEP_INT64, 0, 1, NULL, NULL));
    sleep_ms(2500); /* it has said that it waits */
    CHECK(kill((pid_t)pid, SIGSTOP) == 0);
    OK(lockstep_send(a, &word, 1, LOCKSTEP_INT64, 0, 2, NULL));
    child = fork();
    if (child == 0) {
      sleep_ms(kLateMs);
      _Exit(kill((pid_t)pid, SIGCONT) == 0 ? 0 : 1);
    }
    OK(sum(b, 4));
    CHECK(waitpid(child, NULL, 0) == child);
    return;
  }
  OK(sum(b, 4));
}

void test_group_lateness(lockstep_group* world) {
  const int rank = lockstep_rank(world);
  lockstep_group *a = NULL, *b = NULL;
  OK(lockstep_split(world, 0, 0, &a));
  OK(lockstep_split(world, 0, 0, &b));
  row(world);
  crossed(a, b, rank);
  OK(lockstep_barrier(world, NULL));
  helper(a, b, rank);
  OK(lockstep_barrier(world, NULL));
  stopped(a, b, rank);
  OK(lockstep_barrier(world, NULL));
  leave_both(a, b);
}
