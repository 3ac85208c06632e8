/* Wrong input, and what happens to the others when a rank goes wrong. */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <math.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

static double now(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static lockstep_status sum(lockstep_group* group, int64_t count) {
  static float data[100000];
  return lockstep_all_reduce(group, data, data, count, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL);
}

static void refused_by_collectives(lockstep_group* world) {
  const lockstep_status bad = LOCKSTEP_INVALID_ARGUMENT;
  const int size = lockstep_size(world);
  const int64_t counts[8] = {-1};
  float x[8] = {0};
  lockstep_request* request = NULL;
  REFUSED(bad, "the group is null", lockstep_all_reduce(NULL, x, x, 1, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL));
  REFUSED(bad, "the input is null", lockstep_all_reduce(world, NULL, x, 1, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL));
  REFUSED(bad, "the output is null", lockstep_all_reduce(world, x, NULL, 1, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL));
  REFUSED(bad, "the count is -4", lockstep_all_reduce(world, x, x, -4, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL));
  REFUSED(bad, "more than one call can take", lockstep_all_gather(world, x, x, INT64_MAX, LOCKSTEP_FLOAT32, NULL));
  REFUSED(bad, "no dtype 99", lockstep_all_reduce(world, x, x, 1, 99, LOCKSTEP_SUM, NULL));
  REFUSED(bad, "no dtype -1", lockstep_broadcast(world, x, 1, -1, 0, NULL));
  REFUSED(bad, "no op 8", lockstep_reduce_scatter(world, x, x, 1, LOCKSTEP_FLOAT32, 8, NULL));
  REFUSED(bad, "no op -2", lockstep_reduce(world, x, x, 1, LOCKSTEP_FLOAT32, -2, 0, NULL));
  REFUSED(bad, "works on integers", lockstep_all_reduce(world, x, x, 1, LOCKSTEP_FLOAT16, LOCKSTEP_XOR, NULL));
  REFUSED(bad, "the root is", lockstep_broadcast(world, x, 1, LOCKSTEP_FLOAT32, size, NULL));
  REFUSED(bad, "the root is -1", lockstep_gather(world, x, x, 1, LOCKSTEP_FLOAT32, -1, &request));
  REFUSED(bad, "the output is null", lockstep_scatter(world, x, NULL, 1, LOCKSTEP_FLOAT32, 0, NULL));
  REFUSED(bad, "counts are null", lockstep_all_to_all_v(world, x, NULL, x, counts, LOCKSTEP_FLOAT32, NULL));
  REFUSED(bad, "the count is -1", lockstep_all_to_all_v(world, x, counts, x, counts, LOCKSTEP_FLOAT32, NULL));
  REFUSED(bad, "no dtype 9", lockstep_all_to_all_v(world, x, counts, x, counts, 9, NULL));
  REFUSED(bad, "other rank", lockstep_send(world, x, 1, LOCKSTEP_FLOAT32, size, 0, NULL));
  REFUSED(bad, "other rank is -1", lockstep_send(world, x, 1, LOCKSTEP_FLOAT32, LOCKSTEP_ANY_RANK, 0, NULL));
  REFUSED(bad, "with itself", lockstep_recv(world, x, 1, LOCKSTEP_FLOAT32, lockstep_rank(world), 0, NULL, NULL));
  CHECK(request == NULL);
}

void test_misuse(lockstep_group* world) {
  const lockstep_status bad = LOCKSTEP_INVALID_ARGUMENT;
  const lockstep_options empty = {0, 0, 0}, negative = {sizeof negative, 0, -1}, no_number = {sizeof no_number, 0, NAN},
                         too_long = {sizeof too_long, 0, 1e9}, negative_join = {sizeof negative_join, -3, 0};
  const struct { /* of a program that was compiled with a later header */
    lockstep_options known;
    double unknown;
  } later = {{sizeof later, 0, 0}, 7};
  lockstep_group* other = world;
  lockstep_request* request = NULL;
  void* memory;
  pid_t child;
  int done;
  CHECK(strcmp(lockstep_last_error(), "") == 0);
  refused_by_collectives(world);
  if (lockstep_size(world) == 1)
    REFUSED(bad, "no other rank", lockstep_recv(world, &done, 1, LOCKSTEP_INT32, LOCKSTEP_ANY_RANK, 0, NULL, NULL));
  REFUSED(bad, "world is null", lockstep_join(NULL, NULL));
  REFUSED(bad, "options->size is 0", lockstep_join(&empty, &other));
  REFUSED(bad, "timeout_s is -1", lockstep_join(&negative, &other));
  REFUSED(bad, "timeout_s is nan", lockstep_join(&no_number, &other));
  REFUSED(bad, "timeout_s is 1000000000.0", lockstep_join(&too_long, &other));
  REFUSED(bad, "join_timeout_s is -3", lockstep_join(&negative_join, &other));
  REFUSED(bad, "already has a world", lockstep_join(&later.known, &other));
  CHECK(other == NULL);
  REFUSED(bad, "group is null", lockstep_split(NULL, 0, 0, &other));
  REFUSED(bad, "part is null", lockstep_split(world, 0, 0, NULL));
  REFUSED(bad, "group is null", lockstep_abort(NULL, "x"));
  REFUSED(bad, "group is null", lockstep_allocate(NULL, 8, &memory));
  REFUSED(bad, "memory is null", lockstep_allocate(world, 8, NULL));
  REFUSED(bad, "group is null", lockstep_free(NULL, &done));
  REFUSED(bad, "not allocated by this group", lockstep_free(world, &done));
  REFUSED(bad, "null", lockstep_test(NULL, &done));
  REFUSED(bad, "null", lockstep_wait(&request, 1));
  REFUSED(bad, "null", lockstep_wait(NULL, 1));
  REFUSED(bad, "stop is null", lockstep_stop_requested(world, NULL));
  CHECK(lockstep_rank(NULL) == -1 && lockstep_size(NULL) == -1);
  CHECK(lockstep_c_version() == LOCKSTEP_C_VERSION_MAJOR * 1000 + LOCKSTEP_C_VERSION_MINOR);
  CHECK(strcmp(lockstep_status_name(LOCKSTEP_MISMATCH), "LOCKSTEP_MISMATCH") == 0);
  CHECK(lockstep_status_name(12345) != NULL);
  OK(lockstep_leave(NULL));
  child = fork();
  if (child == 0) {
    REFUSED(bad, "not to a child", sum(world, 10));
    REFUSED(bad, "not to a child", lockstep_leave(world));
    _Exit(0);
  }
  CHECK(waitpid(child, &done, 0) == child && done == 0);
  OK(sum(world, 10)); /* and the group is as it was */
}

static int threads_of_this_process(void) {
  DIR* tasks = opendir("/proc/self/task");
  int count = -2; /* . and .. */
  CHECK(tasks != NULL);
  while (readdir(tasks) != NULL) ++count;
  closedir(tasks);
  return count;
}

/* Leaves and joins, as often as the ranks like, out of step; nothing of the library stays behind. */
void test_join_again(lockstep_group* world) {
  const lockstep_options options = {sizeof options, 20, 20};
  struct sigaction action;
  const int rank = lockstep_rank(world);
  int round, signals;
  for (round = 0; round < 20; ++round) {
    lockstep_group* next = NULL;
    OK(sum(world, 1000));
    CHECK(threads_of_this_process() == 1);
    OK(lockstep_leave(world));
    OK(lockstep_join(&options, &next));
    world = next;
  }
  for (signals = 1; signals < 32; ++signals) {
    CHECK(sigaction(signals, NULL, &action) == 0);
    CHECK(action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN);
  }
  OK(lockstep_leave(world));
  printf("join_again: ok on rank %d\n", rank);
  exit(0); /* the world that main() would leave is gone */
}

void test_mismatch(lockstep_group* world) {
  const int rank = lockstep_rank(world);
  lockstep_group *first = NULL, *second = NULL;
  float x = 0;
  OK(lockstep_split(world, 0, 0, &first));
  OK(lockstep_split(world, 0, 0, &second));
  REFUSED(LOCKSTEP_MISMATCH, "100 elements", sum(first, rank == 1 ? 100 : 101)); /* both sides are named */
  CHECK(strstr(lockstep_last_error(), "101 elements") != NULL);
  REFUSED(LOCKSTEP_MISMATCH, "101 elements", sum(first, 5)); /* the group has ended, with the same text */
  if (rank == 1)
    REFUSED(LOCKSTEP_MISMATCH, "barrier", lockstep_barrier(second, NULL));
  else
    REFUSED(LOCKSTEP_MISMATCH, "broadcast", lockstep_broadcast(second, &x, 1, LOCKSTEP_FLOAT32, 0, NULL));
  OK(lockstep_leave(first));
  OK(lockstep_leave(second));
  OK(sum(world, 10)); /* other groups have not */
}

void test_killed(lockstep_group* world) {
  const int victim = lockstep_size(world) - 1;
  double start;
  int i;
  for (i = 0; i < 100; ++i) OK(sum(world, 50000));
  if (lockstep_rank(world) == victim) raise(SIGKILL);
  start = now();
  REFUSED(LOCKSTEP_RANK_GONE, "all_reduce", sum(world, 50000));
  CHECK(now() - start < 5);
  if (victim == 1)
    CHECK(strstr(lockstep_last_error(), "rank 1 ") != NULL);
  else
    CHECK(strstr(lockstep_last_error(), "rank 2 ") != NULL);
}

void test_leaves(lockstep_group* world) {
  lockstep_group* part = NULL;
  lockstep_request* request = NULL;
  float x[4] = {0};
  OK(lockstep_split(world, 0, 0, &part));
  OK(sum(part, 1000));
  if (lockstep_rank(world) == 1) {
    OK(lockstep_leave(part));
  } else {
    REFUSED(LOCKSTEP_RANK_GONE, "rank 1", sum(part, 1000));
    OK(lockstep_leave(part));
  }
  /* a request outlives its group, and says so */
  OK(lockstep_split(world, 0, 0, &part));
  OK(lockstep_recv(part, x, 4, LOCKSTEP_FLOAT32, (lockstep_rank(world) + 1) % lockstep_size(world), 3, NULL, &request));
  OK(lockstep_leave(part));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "left the group", lockstep_wait(&request, 1));
  CHECK(request == NULL);
  OK(sum(world, 10));
}

void test_times_out(lockstep_group* world) {
  lockstep_group* part = NULL;
  lockstep_request* request = NULL;
  float x[4] = {0};
  OK(lockstep_split(world, 0, 0, &part));
  if (lockstep_rank(world) == 0) {
    int done = 7;
    OK(lockstep_all_reduce(part, x, x, 4, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, &request));
    OK(lockstep_test(request, &done));
    CHECK(done == 0);
    REFUSED(LOCKSTEP_TIMED_OUT, "rank", lockstep_wait(&request, 0.2));
    CHECK(request == NULL);
  }
  OK(lockstep_barrier(world, NULL));
  REFUSED(LOCKSTEP_TIMED_OUT, "raise timeout_s of lockstep_options, or the seconds of lockstep_wait().", sum(part, 4));
  CHECK(strstr(lockstep_last_error(), "ContextOptions") == NULL && strstr(lockstep_last_error(), "Python") == NULL);
  OK(lockstep_leave(part));
}

/* A rank that only polls is told after the time limit, as one that waits. */
void test_polled(lockstep_group* world) {
  const lockstep_options options = {sizeof options, 20, 1};
  const struct timespec late = {2, 500000000}, pause = {0, 1000000};
  lockstep_group *first = NULL, *part = NULL;
  lockstep_request *sum_request = NULL, *message = NULL;
  const int rank = lockstep_rank(world);
  float x[4] = {0};
  OK(lockstep_leave(world));
  OK(lockstep_join(&options, &world));
  OK(lockstep_split(world, 0, 0, &first));
  OK(lockstep_split(world, 0, 0, &part));
  if (rank == 0) {
    int done = 0;
    double start = now();
    lockstep_status status = LOCKSTEP_OK;
    OK(lockstep_all_reduce(first, x, x, 4, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, &sum_request));
    OK(lockstep_recv(part, x, 4, LOCKSTEP_FLOAT32, 1, 3, NULL, &message));
    while (status == LOCKSTEP_OK && !done && now() - start < 10) {
      status = lockstep_test(sum_request, &done);
      nanosleep(&pause, NULL);
    }
    CHECK(status == LOCKSTEP_TIMED_OUT && done == 1 && now() - start >= 1 && now() - start < 2);
    CHECK(strstr(lockstep_last_error(), "timeout after 1.0 s, missing rank") != NULL);
    REFUSED(LOCKSTEP_TIMED_OUT, "all_reduce", lockstep_test(sum_request, &done)); /* and again */
    REFUSED(LOCKSTEP_TIMED_OUT, "timeout after 1.0 s, missing rank", lockstep_wait(&sum_request, -1));
    for (start = now(), status = LOCKSTEP_OK, done = 0; status == LOCKSTEP_OK && !done && now() - start < 10;) {
      status = lockstep_test(message, &done);
      nanosleep(&pause, NULL);
    }
    CHECK(status == LOCKSTEP_TIMED_OUT && done == 1 && now() - start >= 1 && now() - start < 2);
    REFUSED(LOCKSTEP_TIMED_OUT, "a recv from rank 1 with tag 3: timeout after 1.0 s", lockstep_wait(&message, -1));
  } else {
    nanosleep(&late, NULL);
  }
  REFUSED(LOCKSTEP_TIMED_OUT, "timeout after 1.0 s", sum(first, 4)); /* the group has ended on every rank */
  OK(lockstep_leave(first));
  OK(lockstep_leave(part));
  OK(lockstep_leave(world));
  printf("polled: ok on rank %d\n", rank);
  exit(0); /* the world that main() would leave is gone */
}

void test_aborts(lockstep_group* world) {
  lockstep_group* part = NULL;
  OK(lockstep_split(world, 0, 0, &part));
  if (lockstep_rank(world) == 1) OK(lockstep_abort(part, "the disk is full"));
  REFUSED(LOCKSTEP_ABORTED, "the disk is full", sum(part, 10));
  OK(lockstep_leave(part));
}

void test_stops_by_itself(lockstep_group* world) {
  int step, stop = 0;
  int64_t mine, least = 0, most = 0;
  for (step = 0; !stop; ++step) {
    CHECK(step < 1000);
    OK(sum(world, 10));
    if (step == 20 && lockstep_rank(world) == lockstep_size(world) - 1) lockstep_request_stop();
    OK(lockstep_stop_requested(world, &stop));
  }
  mine = step;
  OK(lockstep_all_reduce(world, &mine, &least, 1, LOCKSTEP_INT64, LOCKSTEP_MIN, NULL));
  OK(lockstep_all_reduce(world, &mine, &most, 1, LOCKSTEP_INT64, LOCKSTEP_MAX, NULL));
  CHECK(least == most && least > 20);
}

void test_trains_until_stopped(lockstep_group* world) {
  const double start = now();
  int stop = 0;
  while (!stop) {
    CHECK(now() - start < 20);
    OK(sum(world, 1000));
    if (lockstep_rank(world) == 0 && now() - start < 1) printf("step\n"), fflush(stdout);
    OK(lockstep_stop_requested(world, &stop));
  }
}
