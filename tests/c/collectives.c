/* What the collectives compute. Expected values are closed forms of rank and index. */
#include <pthread.h>

#include "check.h"

enum { kMaxRanks = 8 };

static void put(void* memory, lockstep_dtype dtype, int64_t i, int value) {
  const float single = (float)value;
  uint32_t bits;
  memcpy(&bits, &single, sizeof bits);
  switch (dtype) {
    case LOCKSTEP_FLOAT32: ((float*)memory)[i] = single; break;
    case LOCKSTEP_FLOAT64: ((double*)memory)[i] = value; break;
    case LOCKSTEP_FLOAT16: /* small whole numbers are normal in both formats */
      ((uint16_t*)memory)[i] = value == 0 ? 0 : (uint16_t)((((bits >> 23) - 127 + 15) << 10) | (bits >> 13 & 0x3ff));
      break;
    case LOCKSTEP_BFLOAT16: ((uint16_t*)memory)[i] = (uint16_t)(bits >> 16); break;
    case LOCKSTEP_INT8: ((int8_t*)memory)[i] = (int8_t)value; break;
    case LOCKSTEP_UINT8: ((uint8_t*)memory)[i] = (uint8_t)value; break;
    case LOCKSTEP_INT16: ((int16_t*)memory)[i] = (int16_t)value; break;
    case LOCKSTEP_INT32: ((int32_t*)memory)[i] = value; break;
    default: ((int64_t*)memory)[i] = value;
  }
}

static size_t width(lockstep_dtype dtype) {
  static const size_t kBytes[] = {4, 8, 2, 2, 1, 1, 2, 4, 8};
  return kBytes[dtype];
}

static int holds(const void* memory, lockstep_dtype dtype, int64_t i, int value) {
  char expected[8];
  put(expected, dtype, 0, value);
  return memcmp((const char*)memory + (size_t)i * width(dtype), expected, width(dtype)) == 0;
}

/* Of rank r at place i: 1 to 4, so that every result is exact in every dtype. */
static int element(int rank, int64_t i) { return 1 + (int)((rank + i) % 4); }

static int reduced(int size, lockstep_op op, int64_t i) {
  int rank, value = element(0, i);
  for (rank = 1; rank < size; ++rank) {
    const int next = element(rank, i);
    if (op == LOCKSTEP_SUM) value += next;
    if (op == LOCKSTEP_PRODUCT) value *= next;
    if (op == LOCKSTEP_MIN) value = next < value ? next : value;
    if (op == LOCKSTEP_MAX) value = next > value ? next : value;
    if (op == LOCKSTEP_AND) value &= next;
    if (op == LOCKSTEP_OR) value |= next;
    if (op == LOCKSTEP_XOR) value ^= next;
  }
  return value;
}

static void reductions(lockstep_group* world, lockstep_dtype dtype, int64_t count, void* in, void* out) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  const int64_t all = count * size;
  int64_t i;
  int op, root;
  for (i = 0; i < all; ++i) put(in, dtype, i, element(rank, i));
  for (op = LOCKSTEP_SUM; op <= LOCKSTEP_XOR; ++op) {
    if (op == LOCKSTEP_MEAN || (op >= LOCKSTEP_AND && dtype <= LOCKSTEP_BFLOAT16)) continue;
    OK(lockstep_all_reduce(world, in, out, count, dtype, op, NULL));
    for (i = 0; i < count; ++i) CHECK(holds(out, dtype, i, reduced(size, op, i)));
    OK(lockstep_reduce_scatter(world, in, out, count, dtype, op, NULL));
    for (i = 0; i < count; ++i) CHECK(holds(out, dtype, i, reduced(size, op, rank * count + i)));
    for (root = 0; root < size; ++root) {
      OK(lockstep_reduce(world, in, rank == root ? out : NULL, count, dtype, op, root, NULL));
      for (i = 0; rank == root && i < count; ++i) CHECK(holds(out, dtype, i, reduced(size, op, i)));
    }
  }
  memcpy(out, in, (size_t)count * width(dtype)); /* in place */
  OK(lockstep_all_reduce(world, out, out, count, dtype, LOCKSTEP_SUM, NULL));
  for (i = 0; i < count; ++i) CHECK(holds(out, dtype, i, reduced(size, LOCKSTEP_SUM, i)));
  for (i = 0; i < count; ++i) put(in, dtype, i, 3);
  OK(lockstep_all_reduce(world, in, out, count, dtype, LOCKSTEP_MEAN, NULL));
  for (i = 0; i < count; ++i) CHECK(holds(out, dtype, i, 3));
}

static void movements(lockstep_group* world, lockstep_dtype dtype, int64_t count, void* in, void* out) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  const int64_t all = count * size;
  int64_t i, sent[kMaxRanks], received[kMaxRanks], total = 0;
  int root, r;
  for (i = 0; i < all; ++i) put(in, dtype, i, element(rank, i));
  OK(lockstep_all_gather(world, in, out, count, dtype, NULL));
  for (i = 0; i < all; ++i) CHECK(holds(out, dtype, i, element((int)(i / count), i % count)));
  OK(lockstep_all_to_all(world, in, out, count, dtype, NULL));
  for (i = 0; i < all; ++i) CHECK(holds(out, dtype, i, element((int)(i / count), rank * count + i % count)));
  for (root = 0; root < size; ++root) {
    OK(lockstep_gather(world, in, rank == root ? out : NULL, count, dtype, root, NULL));
    for (i = 0; rank == root && i < all; ++i) CHECK(holds(out, dtype, i, element((int)(i / count), i % count)));
    OK(lockstep_scatter(world, rank == root ? in : NULL, out, count, dtype, root, NULL));
    for (i = 0; i < count; ++i) CHECK(holds(out, dtype, i, element(root, rank * count + i)));
    for (i = 0; i < count; ++i) put(out, dtype, i, rank == root ? element(root, i) : 0);
    OK(lockstep_broadcast(world, out, count, dtype, root, NULL));
    for (i = 0; i < count; ++i) CHECK(holds(out, dtype, i, element(root, i)));
  }
  for (r = 0; r < size; ++r) { /* rank a sends (a + 2b) % 3 elements to rank b */
    sent[r] = (rank + 2 * r) % 3;
    received[r] = (r + 2 * rank) % 3;
  }
  OK(lockstep_all_to_all_v(world, in, sent, out, received, dtype, NULL));
  for (r = 0; r < size; ++r) {
    int64_t before = 0;
    int other;
    for (other = 0; other < rank; ++other) before += (r + 2 * other) % 3;
    for (i = 0; i < received[r]; ++i) CHECK(holds(out, dtype, total++, element(r, before + i)));
  }
}

void test_every_collective(lockstep_group* world) {
  static const int64_t kCounts[] = {3, 1000, 70001}; /* in a line, in one shot, in rounds */
  const int size = lockstep_size(world);
  size_t c;
  int dtype;
  CHECK(size >= 1 && size <= kMaxRanks && lockstep_rank(world) >= 0 && lockstep_rank(world) < size);
  for (dtype = LOCKSTEP_FLOAT32; dtype <= LOCKSTEP_INT64; ++dtype)
    for (c = 0; c < sizeof kCounts / sizeof kCounts[0]; ++c) {
      const size_t bytes = (size_t)kCounts[c] * (size_t)size * width(dtype);
      void *in = malloc(bytes), *out = malloc(bytes);
      CHECK(in != NULL && out != NULL);
      reductions(world, dtype, kCounts[c], in, out);
      movements(world, dtype, kCounts[c], in, out);
      free(in);
      free(out);
    }
  OK(lockstep_barrier(world, NULL));
  OK(lockstep_all_reduce(world, NULL, NULL, 0, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL)); /* nothing at all */
}

void test_in_flight(lockstep_group* world) {
  enum { kRequests = 50, kCount = 5000 };
  static float data[kRequests][kCount];
  lockstep_request* requests[kRequests];
  const int size = lockstep_size(world);
  int n, i, done = 0;
  for (n = 0; n < kRequests; ++n) {
    for (i = 0; i < kCount; ++i) data[n][i] = (float)element(lockstep_rank(world), n + i);
    OK(lockstep_all_reduce(world, data[n], data[n], kCount, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, &requests[n]));
  }
  while (!done) OK(lockstep_test(requests[kRequests - 1], &done));
  for (n = kRequests - 1; n >= 0; --n) { /* in any order */
    OK(lockstep_wait(&requests[n], -1));
    CHECK(requests[n] == NULL);
    for (i = 0; i < kCount; ++i) CHECK(data[n][i] == (float)reduced(size, LOCKSTEP_SUM, n + i));
  }
}

void test_messages(lockstep_group* world) {
  enum { kLarge = 300000 }; /* more than a channel holds */
  static int32_t mine[kLarge], theirs[kLarge];
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  const int to = (rank + 1) % size, from = (rank + size - 1) % size;
  lockstep_request *sent = NULL, *received = NULL;
  int i, source = -5;
  for (i = 0; i < kLarge; ++i) mine[i] = rank * kLarge + i;
  OK(lockstep_send(world, mine, kLarge, LOCKSTEP_INT32, to, 7, &sent));
  OK(lockstep_recv(world, theirs, kLarge, LOCKSTEP_INT32, from, 7, &source, &received));
  OK(lockstep_wait(&received, 20));
  OK(lockstep_wait(&sent, 20));
  CHECK(source == from);
  for (i = 0; i < kLarge; ++i) CHECK(theirs[i] == from * kLarge + i);
  if (rank != 0) OK(lockstep_send(world, &rank, 1, LOCKSTEP_INT32, 0, 1, NULL));
  for (i = 1; rank == 0 && i < size; ++i) {
    int32_t who = -1;
    OK(lockstep_recv(world, &who, 1, LOCKSTEP_INT32, LOCKSTEP_ANY_RANK, 1, &source, NULL));
    CHECK(who == source && who > 0 && who < size);
  }
}

static int64_t sum_of_ranks(lockstep_group* group) {
  int64_t mine = lockstep_rank(group), sum = -1;
  OK(lockstep_all_reduce(group, &mine, &sum, 1, LOCKSTEP_INT64, LOCKSTEP_SUM, NULL));
  return sum;
}

void test_parts(lockstep_group* world) {
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  lockstep_group *half = NULL, *backwards = NULL, *but_first = NULL;
  int64_t value = rank;
  OK(lockstep_split(world, rank % 2, 0, &half));
  CHECK(lockstep_size(half) == (size + 1 - rank % 2) / 2 && lockstep_rank(half) == rank / 2);
  CHECK(sum_of_ranks(half) == lockstep_size(half) * (lockstep_size(half) - 1) / 2);
  OK(lockstep_split(world, 5, -rank, &backwards));
  CHECK(lockstep_rank(backwards) == size - 1 - rank);
  OK(lockstep_broadcast(backwards, &value, 1, LOCKSTEP_INT64, 0, NULL));
  CHECK(value == size - 1);
  OK(lockstep_split(world, rank == 0 ? -1 : 0, 0, &but_first));
  CHECK((but_first == NULL) == (rank == 0));
  if (but_first != NULL) CHECK(sum_of_ranks(but_first) == (size - 1) * (size - 2) / 2);
  OK(lockstep_leave(half));
  OK(lockstep_leave(backwards));
  OK(lockstep_leave(but_first));
  CHECK(sum_of_ranks(world) == size * (size - 1) / 2);
}

static void* use_group(void* group) {
  int i;
  for (i = 0; i < 500; ++i) {
    const int64_t size = lockstep_size(group);
    CHECK(sum_of_ranks(group) == size * (size - 1) / 2);
  }
  return NULL;
}

static void* receive_from_1(void* group) {
  int32_t value = 0;
  lockstep_status status; /* refused in turn while the other thread is in a call */
  do status = lockstep_recv(group, &value, 1, LOCKSTEP_INT32, 1, 0, NULL, NULL);
  while (status == LOCKSTEP_INVALID_ARGUMENT);
  CHECK(status == LOCKSTEP_OK && value == 17);
  return NULL;
}

/* While one thread is in a call of a group, another one is refused, even with a call that would be wrong in any case. */
static void two_threads_in_one_group(lockstep_group* world, lockstep_group* group) {
  const int32_t value = 17;
  pthread_t thread;
  if (lockstep_rank(group) == 0) CHECK(pthread_create(&thread, NULL, receive_from_1, group) == 0);
  while (lockstep_rank(group) == 0 && strstr(lockstep_last_error(), "another thread") == NULL)
    CHECK(lockstep_broadcast(group, NULL, 1, 99, 0, NULL) == LOCKSTEP_INVALID_ARGUMENT);
  OK(lockstep_barrier(world, NULL));
  if (lockstep_rank(group) == 1) OK(lockstep_send(group, &value, 1, LOCKSTEP_INT32, 0, 0, NULL));
  if (lockstep_rank(group) == 0) CHECK(pthread_join(thread, NULL) == 0);
}

void test_threads(lockstep_group* world) {
  enum { kThreads = 3 };
  lockstep_group* groups[kThreads];
  pthread_t threads[kThreads];
  int i;
  for (i = 0; i < kThreads; ++i) OK(lockstep_split(world, 0, 0, &groups[i]));
  two_threads_in_one_group(world, groups[0]);
  for (i = 0; i < kThreads; ++i) CHECK(pthread_create(&threads[i], NULL, use_group, groups[i]) == 0);
  for (i = 0; i < kThreads; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
  for (i = 0; i < kThreads; ++i) OK(lockstep_leave(groups[i]));
}

void test_memory(lockstep_group* world) {
  enum { kCount = 1 << 20 };
  const int rank = lockstep_rank(world), size = lockstep_size(world);
  void* memory = NULL;
  float* values;
  int64_t i;
  OK(lockstep_allocate(world, kCount * sizeof *values, &memory));
  CHECK((uintptr_t)memory % 4096 == 0);
  values = memory;
  for (i = 0; i < kCount; ++i) values[i] = (float)element(rank, i);
  OK(lockstep_all_reduce(world, values, values, kCount, LOCKSTEP_FLOAT32, LOCKSTEP_SUM, NULL));
  for (i = 0; i < kCount; ++i) CHECK(values[i] == (float)reduced(size, LOCKSTEP_SUM, i));
  OK(lockstep_free(world, memory));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "freed before", lockstep_free(world, memory));
  OK(lockstep_free(world, NULL));
  REFUSED(LOCKSTEP_INVALID_ARGUMENT, "more than any machine has", lockstep_allocate(world, (size_t)-1, &memory));
  CHECK(memory == NULL);
  CHECK(lockstep_allocate(world, (size_t)1 << 45, &memory) == LOCKSTEP_OUT_OF_RESOURCES && memory == NULL);
}
