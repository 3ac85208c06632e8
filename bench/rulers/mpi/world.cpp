// An MPI for programs that somebody else wrote: placed before a real one by LD_PRELOAD, it answers the collectives and
// messages of MPI_COMM_WORLD by Lockstep, and leaves everything else to the real one below (its PMPI_ functions). So a
// program for measuring MPIs measures Lockstep, unchanged.
//
//     mpicxx -std=c++20 -O2 -shared -fPIC -Iinclude bench/rulers/mpi/*.cpp -o ruler.so -Lbuild/lib -llockstep_c
//     mpirun -n 2 env LD_PRELOAD=$PWD/ruler.so ./program
//
// All ranks must decide in the same way who answers, so the decision looks only at what MPI wants equal everywhere: the
// communicator, the operation, whether the type is one of MPI's own for numbers. A program may not mix a derived type
// on one rank with a plain one on another, nor receive a message by a probe, by any tag, or shorter than its buffer:
// these end the program with a text. Progress of the real MPI and of Lockstep is made only in calls that wait for the
// one or the other. Rank 0 says at the end how many calls each has answered, so that nobody measures the wrong one
// unnoticed.

#include "world.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <type_traits>

namespace lockstep::rulers {

lockstep_group* world = nullptr;
Calls calls;

namespace {

struct NamedType {
  MPI_Datatype datatype;
  Type type;
};

constexpr Type integer(int64_t bytes, bool is_unsigned) {
  constexpr lockstep_dtype by_bytes[] = {LOCKSTEP_INT8, LOCKSTEP_INT8, LOCKSTEP_INT16, LOCKSTEP_INT8, LOCKSTEP_INT32,
                                         LOCKSTEP_INT8, LOCKSTEP_INT8, LOCKSTEP_INT8,  LOCKSTEP_INT64};
  if (bytes == 1 && is_unsigned) return {1, LOCKSTEP_UINT8};
  return {bytes, by_bytes[bytes], is_unsigned};
}
template <typename T>
constexpr Type integer() {
  return integer(sizeof(T), std::is_unsigned_v<T>);
}

/// Handles are constants in one MPI and addresses in another. The usual ones come first.
const auto& named_types() {
  static const auto types = std::to_array<NamedType>({
      {MPI_CHAR, integer<signed char>()},
      {MPI_FLOAT, {4, LOCKSTEP_FLOAT32, false, false}},
      {MPI_DOUBLE, {8, LOCKSTEP_FLOAT64, false, false}},
      {MPI_INT, integer<int>()},
      {MPI_BYTE, integer<unsigned char>()},
      {MPI_SIGNED_CHAR, integer<signed char>()},
      {MPI_UNSIGNED_CHAR, integer<unsigned char>()},
      {MPI_SHORT, integer<short>()},
      {MPI_UNSIGNED_SHORT, integer<unsigned short>()},
      {MPI_UNSIGNED, integer<unsigned>()},
      {MPI_LONG, integer<long>()},
      {MPI_UNSIGNED_LONG, integer<unsigned long>()},
      {MPI_LONG_LONG, integer<long long>()},
      {MPI_UNSIGNED_LONG_LONG, integer<unsigned long long>()},
      {MPI_INT8_T, integer<int8_t>()},
      {MPI_UINT8_T, integer<uint8_t>()},
      {MPI_INT16_T, integer<int16_t>()},
      {MPI_UINT16_T, integer<uint16_t>()},
      {MPI_INT32_T, integer<int32_t>()},
      {MPI_UINT32_T, integer<uint32_t>()},
      {MPI_INT64_T, integer<int64_t>()},
      {MPI_UINT64_T, integer<uint64_t>()},
  });
  return types;
}

std::array<Pending, 4096> pendings;
size_t next_pending = 0;

/// Handles of ours: where the MPI's are pointers, the address of a Pending; where they are numbers, one of a kind that
/// MPICH gives to nothing.
constexpr size_t kHandles = 0x00A50000;

template <typename Request>
Request handle_of(size_t index) {
  if constexpr (std::is_pointer_v<Request>)
    return reinterpret_cast<Request>(&pendings[index]);
  else
    return static_cast<Request>(kHandles + index);
}

/// Beyond the last index if the handle is the MPI's.
template <typename Request>
size_t index_of(Request handle) {
  if constexpr (std::is_pointer_v<Request>) {
    const auto address = reinterpret_cast<uintptr_t>(handle), first = reinterpret_cast<uintptr_t>(pendings.data());
    return address < first ? pendings.size() : (address - first) / sizeof(Pending);
  } else {
    return static_cast<size_t>(static_cast<unsigned>(handle)) - kHandles;
  }
}

}  // namespace

void give_up(const char* call, const char* why) {
  int rank = -1;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  std::fprintf(stderr, "Lockstep below MPI, rank %d: %s: %s\n", rank, call, why);
  PMPI_Abort(MPI_COMM_WORLD, 1);
  std::abort();
}

void check(lockstep_status status, const char* call) {
  if (status != LOCKSTEP_OK)
    give_up(call, (std::string(lockstep_status_name(status)) + ": " + lockstep_last_error()).c_str());
}

void join_world() {
  check(lockstep_join(nullptr, &world), "MPI_Init");
  int rank = 0, size = 0;
  PMPI_Comm_rank(MPI_COMM_WORLD, &rank);
  PMPI_Comm_size(MPI_COMM_WORLD, &size);
  if (rank != lockstep_rank(world) || size != lockstep_size(world))
    give_up("MPI_Init", "Lockstep found other ranks than MPI_COMM_WORLD's");
}

void leave_world() {
  if (world == nullptr) return;
  check(lockstep_barrier(world, nullptr), "MPI_Finalize");  // nobody still needs this rank
  if (lockstep_rank(world) == 0)
    std::fprintf(stderr, "Lockstep below MPI: %lld calls by Lockstep, %lld by the MPI\n",
                 static_cast<long long>(calls.by_lockstep), static_cast<long long>(calls.by_mpi));
  check(lockstep_leave(world), "MPI_Finalize");
  world = nullptr;
}

Type type_of(MPI_Datatype datatype) {
  for (const NamedType& named : named_types())
    if (named.datatype == datatype) return named.type;
  return {};
}

bool can_reduce(const Type& type, MPI_Op op, lockstep_op* named) {
  if (type.bytes == 0) return false;
  const auto is = [&](lockstep_op mine, bool possible) { return *named = mine, possible; };
  if (op == MPI_SUM) return is(LOCKSTEP_SUM, true);
  if (op == MPI_MAX) return is(LOCKSTEP_MAX, !type.is_unsigned);
  if (op == MPI_MIN) return is(LOCKSTEP_MIN, !type.is_unsigned);
  if (op == MPI_PROD) return is(LOCKSTEP_PRODUCT, true);
  if (op == MPI_BAND) return is(LOCKSTEP_AND, type.is_integer);
  if (op == MPI_BOR) return is(LOCKSTEP_OR, type.is_integer);
  if (op == MPI_BXOR) return is(LOCKSTEP_XOR, type.is_integer);
  return false;
}

Pending& new_pending(MPI_Request* handle) {
  for (size_t tried = 0; tried < pendings.size(); ++tried) {
    const size_t index = next_pending++ % pendings.size();
    if (pendings[index].is_used) continue;
    pendings[index] = {.is_used = true};
    *handle = handle_of<MPI_Request>(index);
    return pendings[index];
  }
  give_up("a request", "more of them are in flight than this library has room for");
}

Pending* pending_of(MPI_Request handle) {
  const size_t index = index_of(handle);
  return index < pendings.size() ? &pendings[index] : nullptr;
}

void fill_status(MPI_Status* status, int source, int tag, int64_t bytes) {
  if (status == MPI_STATUS_IGNORE) return;
  status->MPI_SOURCE = source;
  status->MPI_TAG = tag;
  PMPI_Status_set_elements_x(status, MPI_BYTE, bytes);
  PMPI_Status_set_cancelled(status, 0);
}

}  // namespace lockstep::rulers

using namespace lockstep::rulers;

extern "C" {

int MPI_Init(int* argc, char*** argv) {
  const int result = PMPI_Init(argc, argv);
  if (result == MPI_SUCCESS) join_world();
  return result;
}

int MPI_Init_thread(int* argc, char*** argv, int required, int* provided) {
  const int result = PMPI_Init_thread(argc, argv, required, provided);
  if (result == MPI_SUCCESS) join_world();
  return result;
}

int MPI_Finalize(void) {
  leave_world();
  return PMPI_Finalize();
}

}  // extern "C"
