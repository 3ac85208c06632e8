/* Every MPI call that bench/rulers answers by Lockstep, on plain numbers: each rank prints what it gets. The same
 * program over an MPI alone must print the same. With "refused CALL" it makes a call that Lockstep does not know. */
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 70000 };
static MPI_Status statuses_of_all[8];
static int rank, size, tag_of_next = 7;
static union numbers {
  float f[8 * MOST];
  int64_t bytes[4 * MOST];
} in, out;

/* A hash of the first `bytes` of `data`, and this rank's line. */
static void show(const char* name, int count, const void* data, size_t bytes) {
  uint64_t hash = 1469598103934665603u;
  for (size_t i = 0; i < bytes; ++i) hash = (hash ^ ((const unsigned char*)data)[i]) * 1099511628211u;
  printf("rank %d: %s of %d: %016llx\n", rank, name, count, (unsigned long long)hash);
}

/* Small whole numbers, so that every order of addition gives the same bits; another one in every place. */
static void fill(MPI_Datatype type, int count) {
  memset(&out, 0, sizeof out);
  for (int i = 0; i < count; ++i) {
    const int value = (i * 7 + rank * 3) % 5 + 1;
    if (type == MPI_FLOAT) in.f[i] = (float)value;
    if (type == MPI_DOUBLE) ((double*)&in)[i] = value;
    if (type == MPI_INT || type == MPI_UNSIGNED) ((int*)&in)[i] = value;
    if (type == MPI_CHAR || type == MPI_BYTE) ((char*)&in)[i] = (char)value;
    if (type == MPI_LONG) ((long*)&in)[i] = value;
    if (type == MPI_SHORT) ((short*)&in)[i] = (short)value;
  }
}

static void reductions(MPI_Datatype type, MPI_Op op, const char* name, int count) {
  int bytes, counts[64];
  MPI_Type_size(type, &bytes);
  fill(type, count * size);
  MPI_Allreduce(&in, &out, count, type, op, MPI_COMM_WORLD);
  show(name, count, &out, (size_t)count * bytes);
  memcpy(&out, &in, (size_t)count * bytes);
  MPI_Allreduce(MPI_IN_PLACE, &out, count, type, op, MPI_COMM_WORLD);
  show(name, count, &out, (size_t)count * bytes);
  memset(&out, 0, sizeof out);
  MPI_Reduce(&in, &out, count, type, op, size - 1, MPI_COMM_WORLD);
  show(name, count, &out, (size_t)count * bytes);
  memcpy(&out, &in, (size_t)count * bytes);
  MPI_Reduce(rank == 0 ? MPI_IN_PLACE : (void*)&in, rank == 0 ? &out : NULL, count, type, op, 0, MPI_COMM_WORLD);
  show(name, count, &out, (size_t)count * bytes);
  MPI_Reduce_scatter_block(&in, &out, count, type, op, MPI_COMM_WORLD);
  show(name, count, &out, (size_t)count * bytes);
  for (int i = 0; i < size; ++i) counts[i] = count;
  MPI_Reduce_scatter(&in, &out, counts, type, op, MPI_COMM_WORLD);
  show(name, count, &out, (size_t)count * bytes);
  for (int i = 0; i < size; ++i) counts[i] = i == 0 ? count : i - 1;
  MPI_Reduce_scatter(&in, &out, counts, type, op, MPI_COMM_WORLD);
  show("uneven reduce_scatter", count, &out, (size_t)counts[rank] * bytes);
  memcpy(&out, &in, (size_t)count * bytes * size);
  MPI_Reduce_scatter_block(MPI_IN_PLACE, &out, count, type, op, MPI_COMM_WORLD);
  show("reduce_scatter_block in place", count, &out, (size_t)count * bytes);
  MPI_Request requests[3];
  memset(&out, 0, sizeof out);
  MPI_Iallreduce(&in, &out, count, type, op, MPI_COMM_WORLD, &requests[0]);
  MPI_Ireduce(&in, out.f + 2 * MOST, count, type, op, 0, MPI_COMM_WORLD, &requests[1]);
  MPI_Ireduce_scatter_block(&in, out.f + 4 * MOST, count, type, op, MPI_COMM_WORLD, &requests[2]);
  MPI_Waitall(3, requests, statuses_of_all);
  show(name, count, &out, sizeof out);
}

static void moves(MPI_Datatype type, const char* name, int count) {
  int bytes, done = 0;
  MPI_Type_size(type, &bytes);
  fill(type, count * size);
  const size_t block = (size_t)count * bytes, all = block * size;
  MPI_Barrier(MPI_COMM_WORLD);
  MPI_Allgather(&in, count, type, &out, count, type, MPI_COMM_WORLD);
  show(name, count, &out, all);
  memcpy(out.f, in.f, all);
  MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, &out, count, type, MPI_COMM_WORLD);
  show(name, count, &out, all);
  MPI_Alltoall(&in, count, type, &out, count, type, MPI_COMM_WORLD);
  show(name, count, &out, all);
  memset(&out, 0, sizeof out);
  MPI_Gather(&in, count, type, &out, count, type, size - 1, MPI_COMM_WORLD);
  show(name, count, &out, all);
  memcpy(&out, &in, all);
  MPI_Gather(rank == 0 ? MPI_IN_PLACE : (void*)&in, count, type, &out, count, type, 0, MPI_COMM_WORLD);
  show(name, count, &out, all);
  MPI_Scatter(&in, count, type, &out, count, type, size - 1, MPI_COMM_WORLD);
  show(name, count, &out, all);
  MPI_Scatter(&in, count, type, rank == 0 ? MPI_IN_PLACE : (void*)&out, count, type, 0, MPI_COMM_WORLD);
  show(name, count, &out, all);
  memcpy(&out, &in, all);
  MPI_Bcast(&out, count, type, size - 1, MPI_COMM_WORLD);
  show(name, count, &out, all);
  MPI_Request requests[6];
  char* const parts = (char*)&out;
  memset(&out, 0, sizeof out);
  memcpy(parts + 3 * all, &in, block);
  MPI_Iallgather(&in, count, type, parts, count, type, MPI_COMM_WORLD, &requests[0]);
  MPI_Ialltoall(&in, count, type, parts + all, count, type, MPI_COMM_WORLD, &requests[1]);
  MPI_Igather(&in, count, type, parts + 2 * all, count, type, 0, MPI_COMM_WORLD, &requests[2]);
  MPI_Ibcast(parts + 3 * all, count, type, 0, MPI_COMM_WORLD, &requests[3]);
  MPI_Iscatter(&in, count, type, parts + 4 * all, count, type, 0, MPI_COMM_WORLD, &requests[4]);
  MPI_Ibarrier(MPI_COMM_WORLD, &requests[5]);
  while (!done) MPI_Testall(6, requests, &done, statuses_of_all);
  show(name, count, &out, 5 * all);
}

static void show_status(const char* name, MPI_Status* status, MPI_Datatype type) {
  int count = -1;
  MPI_Get_count(status, type, &count);
  printf("rank %d: %s: from %d, tag %d, %d elements\n", rank, name, status->MPI_SOURCE, status->MPI_TAG, count);
}

/* Around a ring: blocking, both ways at once, and several in flight. */
static void messages(MPI_Datatype type, const char* name, int count) {
  const int next = (rank + 1) % size, before = (rank + size - 1) % size, tag = tag_of_next++;
  int bytes, index, done = 0;
  MPI_Status status, statuses[4];
  MPI_Type_size(type, &bytes);
  fill(type, 2 * count);
  const size_t block = (size_t)count * bytes;
  if (rank == 0) MPI_Send(&in, count, type, next, tag, MPI_COMM_WORLD);
  MPI_Recv(&out, count, type, rank == 1 ? MPI_ANY_SOURCE : before, tag, MPI_COMM_WORLD, &status);
  if (rank != 0) MPI_Ssend(&in, count, type, next, tag, MPI_COMM_WORLD);
  show_status(name, &status, type);
  show(name, count, &out, block);
  MPI_Sendrecv((char*)&in + block, count, type, next, tag, &out, count, type, before, tag, MPI_COMM_WORLD, &status);
  show_status(name, &status, type);
  show(name, count, &out, block);
  MPI_Request requests[4];
  char* const parts = (char*)&out;
  MPI_Irecv(parts, count, type, before, tag + 1000, MPI_COMM_WORLD, &requests[0]);
  MPI_Irecv(parts + block, count, type, before, tag, MPI_COMM_WORLD, &requests[1]);
  MPI_Isend(&in, count, type, next, tag, MPI_COMM_WORLD, &requests[2]);
  MPI_Isend((char*)&in + block, count, type, next, tag + 1000, MPI_COMM_WORLD, &requests[3]);
  while (!done) MPI_Test(&requests[1], &done, &statuses[1]);
  if (requests[1] != MPI_REQUEST_NULL) printf("rank %d: a request that is done is not null\n", rank);
  MPI_Waitany(1, requests, &index, &statuses[0]);
  MPI_Waitall(2, requests + 2, statuses_of_all);
  for (int i = 0; i < 2; ++i) show_status(name, &statuses[i], type);
  show(name, count, &out, 2 * block);
}

/* What stays the MPI's: other communicators, types of the program's own, and oneself. */
static void the_others(void) {
  MPI_Comm part;
  MPI_Datatype pair;
  int sum = 0, pairs[2] = {rank, rank + 1}, all[128] = {0};
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, 0, &part);
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, part);
  show("a part's sum", 1, &sum, sizeof sum);
  MPI_Comm_free(&part);
  MPI_Type_contiguous(2, MPI_INT, &pair);
  MPI_Type_commit(&pair);
  MPI_Allgather(pairs, 1, pair, all, 1, pair, MPI_COMM_WORLD);
  show("pairs", 1, all, sizeof all);
  MPI_Type_free(&pair);
  MPI_Sendrecv(pairs, 2, MPI_INT, rank, 1, all, 2, MPI_INT, rank, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  show("to oneself", 2, all, sizeof all);
  unsigned large = rank == 0 ? 0xF0000000u : 1u, most = 0;
  MPI_Allreduce(&large, &most, 1, MPI_UNSIGNED, MPI_MAX, MPI_COMM_WORLD);
  show("greatest unsigned", 1, &most, sizeof most);
}

static void refused(const char* call) {
  MPI_Status status;
  int there = 0;
  if (strcmp(call, "MPI_Probe") == 0) MPI_Probe(MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, &status);
  if (strcmp(call, "MPI_Iprobe") == 0) MPI_Iprobe(MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, &there, &status);
  if (strcmp(call, "MPI_Recv") == 0) MPI_Recv(&in, 1, MPI_INT, !rank, MPI_ANY_TAG, MPI_COMM_WORLD, &status);
}

int main(int argc, char** argv) {
  static const int counts[] = {1, 3, 1000, 8000};
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  if (argc == 3) refused(argv[2]);
  for (int i = 0; i < 4; ++i) {
    reductions(MPI_FLOAT, MPI_SUM, "float sums", counts[i]);
    reductions(MPI_DOUBLE, MPI_MAX, "greatest doubles", counts[i]);
    reductions(MPI_INT, MPI_PROD, "products of ints", counts[i]);
    reductions(MPI_LONG, MPI_MIN, "least longs", counts[i]);
    reductions(MPI_SHORT, MPI_BXOR, "xor of shorts", counts[i]);
    reductions(MPI_UNSIGNED, MPI_BAND, "and of unsigned", counts[i]);
    moves(MPI_FLOAT, "floats", counts[i]);
    moves(MPI_CHAR, "chars", counts[i]);
    messages(MPI_BYTE, "bytes around", counts[i]);
    messages(MPI_DOUBLE, "doubles around", counts[i]);
  }
  the_others();
  MPI_Finalize();
  return 0;
}
