// The collectives, blocking and not. Each of the functions in the namespace returns whether Lockstep has taken the
// call: with a null `handle` it is done then, otherwise started.

#include <algorithm>
#include <cstring>
#include <vector>

#include "world.h"

namespace lockstep::rulers {
namespace {

/// The `request` argument of Lockstep's functions.
class Started {
 public:
  explicit Started(MPI_Request* handle) : pending_(handle != nullptr ? &new_pending(handle) : nullptr) {}
  operator lockstep_request**() const { return pending_ != nullptr ? &pending_->request : nullptr; }

 private:
  Pending* const pending_;
};

bool taken(bool by_lockstep) {
  if (world != nullptr) ++(by_lockstep ? calls.by_lockstep : calls.by_mpi);
  return by_lockstep;
}

/// Memory for a block that a blocking call must not read and write at once.
void* scratch(int64_t bytes) {
  static std::vector<char> memory;
  if (static_cast<int64_t>(memory.size()) < bytes) memory.resize(static_cast<size_t>(bytes));
  return memory.data();
}

const void* copy_of(const void* block, int64_t bytes) {
  return bytes == 0 ? block : std::memcpy(scratch(bytes), block, static_cast<size_t>(bytes));
}

const void* block_of(const void* blocks, int64_t bytes) {
  return static_cast<const char*>(blocks) + lockstep_rank(world) * bytes;
}

bool barrier(MPI_Comm comm, MPI_Request* handle) {
  if (!taken(is_ours(comm))) return false;
  check(lockstep_barrier(world, Started(handle)), "MPI_Barrier");
  return true;
}

bool broadcast(void* data, int count, MPI_Datatype datatype, int root, MPI_Comm comm, MPI_Request* handle) {
  const Type type = type_of(datatype);
  if (!taken(is_ours(comm) && type.bytes != 0)) return false;
  check(lockstep_broadcast(world, data, count * type.bytes, LOCKSTEP_UINT8, root, Started(handle)), "MPI_Bcast");
  return true;
}

bool all_reduce(const void* input, void* output, int count, MPI_Datatype datatype, MPI_Op op, MPI_Comm comm,
                MPI_Request* handle) {
  const Type type = type_of(datatype);
  lockstep_op named = LOCKSTEP_SUM;
  if (!taken(is_ours(comm) && can_reduce(type, op, &named))) return false;
  if (input == MPI_IN_PLACE) input = output;
  check(lockstep_all_reduce(world, input, output, count, type.dtype, named, Started(handle)), "MPI_Allreduce");
  return true;
}

bool reduce(const void* input, void* output, int count, MPI_Datatype datatype, MPI_Op op, int root, MPI_Comm comm,
            MPI_Request* handle) {
  const Type type = type_of(datatype);
  lockstep_op named = LOCKSTEP_SUM;
  if (!taken(is_ours(comm) && can_reduce(type, op, &named))) return false;
  if (input == MPI_IN_PLACE) input = output;
  check(lockstep_reduce(world, input, output, count, type.dtype, named, root, Started(handle)), "MPI_Reduce");
  return true;
}

/// Blocks of one length. In place, this rank's block of the input would be the output, and the MPI does it.
bool reduce_scatter(const void* input, void* output, int count, MPI_Datatype datatype, MPI_Op op, MPI_Comm comm,
                    MPI_Request* handle) {
  const Type type = type_of(datatype);
  lockstep_op named = LOCKSTEP_SUM;
  if (!taken(is_ours(comm) && input != MPI_IN_PLACE && can_reduce(type, op, &named))) return false;
  check(lockstep_reduce_scatter(world, input, output, count, type.dtype, named, Started(handle)), "MPI_Reduce_scatter");
  return true;
}

/// Blocks of different lengths: all of it is summed everywhere, which is for few elements.
bool reduce_scatter_uneven(const void* input, void* output, const int* counts, MPI_Datatype datatype, MPI_Op op,
                           MPI_Comm comm) {
  const Type type = type_of(datatype);
  lockstep_op named = LOCKSTEP_SUM;
  if (!taken(is_ours(comm) && can_reduce(type, op, &named))) return false;
  int64_t all = 0, before = 0;
  for (int rank = 0; rank < lockstep_size(world); ++rank) {
    if (rank == lockstep_rank(world)) before = all;
    all += counts[rank];
  }
  if (input == MPI_IN_PLACE) input = output;
  void* const sum = scratch(all * type.bytes);
  check(lockstep_all_reduce(world, input, sum, all, type.dtype, named, nullptr), "MPI_Reduce_scatter");
  std::copy_n(static_cast<const char*>(sum) + before * type.bytes, counts[lockstep_rank(world)] * type.bytes,
              static_cast<char*>(output));
  return true;
}

/// In place: this rank's block lies in the output already. Only a blocking call can keep a copy of it.
bool all_gather(const void* input, int send_count, MPI_Datatype send_type, void* output, int receive_count,
                MPI_Datatype receive_type, MPI_Comm comm, MPI_Request* handle) {
  const bool in_place = input == MPI_IN_PLACE;
  const Type type = in_place ? type_of(receive_type) : type_of(send_type);
  const int64_t bytes = (in_place ? receive_count : send_count) * type.bytes;
  if (!taken(is_ours(comm) && type.bytes != 0 && !(in_place && handle != nullptr))) return false;
  if (in_place) input = copy_of(block_of(output, bytes), bytes);
  check(lockstep_all_gather(world, input, output, bytes, LOCKSTEP_UINT8, Started(handle)), "MPI_Allgather");
  return true;
}

bool gather(const void* input, int send_count, MPI_Datatype send_type, void* output, int receive_count,
            MPI_Datatype receive_type, int root, MPI_Comm comm, MPI_Request* handle) {
  const bool in_place = input == MPI_IN_PLACE;  // only on the root
  const Type type = in_place ? type_of(receive_type) : type_of(send_type);
  const int64_t bytes = (in_place ? receive_count : send_count) * type.bytes;
  if (!taken(is_ours(comm) && type.bytes != 0)) return false;
  if (in_place && handle != nullptr)
    give_up("MPI_Igather", "MPI_IN_PLACE needs a copy, which is made in MPI_Gather only");
  if (in_place) input = copy_of(block_of(output, bytes), bytes);
  check(lockstep_gather(world, input, output, bytes, LOCKSTEP_UINT8, root, Started(handle)), "MPI_Gather");
  return true;
}

bool scatter(const void* input, int send_count, MPI_Datatype send_type, void* output, int receive_count,
             MPI_Datatype receive_type, int root, MPI_Comm comm, MPI_Request* handle) {
  const bool in_place = output == MPI_IN_PLACE;  // only on the root: its block stays where it is
  const Type type = in_place ? type_of(send_type) : type_of(receive_type);
  const int64_t bytes = (in_place ? send_count : receive_count) * type.bytes;
  if (!taken(is_ours(comm) && type.bytes != 0)) return false;
  if (in_place && handle != nullptr)
    give_up("MPI_Iscatter", "MPI_IN_PLACE needs a copy, which is made in MPI_Scatter only");
  if (in_place) output = scratch(bytes);
  check(lockstep_scatter(world, input, output, bytes, LOCKSTEP_UINT8, root, Started(handle)), "MPI_Scatter");
  return true;
}

bool all_to_all(const void* input, int count, MPI_Datatype datatype, void* output, MPI_Comm comm, MPI_Request* handle) {
  const Type type = type_of(datatype);
  if (!taken(is_ours(comm) && input != MPI_IN_PLACE && type.bytes != 0)) return false;
  check(lockstep_all_to_all(world, input, output, count * type.bytes, LOCKSTEP_UINT8, Started(handle)), "MPI_Alltoall");
  return true;
}

bool are_even(const int* counts, MPI_Comm comm) {
  if (!is_ours(comm)) return true;
  return std::all_of(counts, counts + lockstep_size(world), [&](int count) { return count == counts[0]; });
}

}  // namespace
}  // namespace lockstep::rulers

using namespace lockstep::rulers;

extern "C" {

int MPI_Barrier(MPI_Comm comm) { return barrier(comm, nullptr) ? MPI_SUCCESS : PMPI_Barrier(comm); }
int MPI_Ibarrier(MPI_Comm comm, MPI_Request* handle) {
  return barrier(comm, handle) ? MPI_SUCCESS : PMPI_Ibarrier(comm, handle);
}

int MPI_Bcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm) {
  return broadcast(data, count, type, root, comm, nullptr) ? MPI_SUCCESS : PMPI_Bcast(data, count, type, root, comm);
}
int MPI_Ibcast(void* data, int count, MPI_Datatype type, int root, MPI_Comm comm, MPI_Request* handle) {
  return broadcast(data, count, type, root, comm, handle) ? MPI_SUCCESS
                                                          : PMPI_Ibcast(data, count, type, root, comm, handle);
}

int MPI_Allreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  return all_reduce(in, out, count, type, op, comm, nullptr) ? MPI_SUCCESS
                                                             : PMPI_Allreduce(in, out, count, type, op, comm);
}
int MPI_Iallreduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                   MPI_Request* handle) {
  return all_reduce(in, out, count, type, op, comm, handle) ? MPI_SUCCESS
                                                            : PMPI_Iallreduce(in, out, count, type, op, comm, handle);
}

int MPI_Reduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm) {
  return reduce(in, out, count, type, op, root, comm, nullptr) ? MPI_SUCCESS
                                                               : PMPI_Reduce(in, out, count, type, op, root, comm);
}
int MPI_Ireduce(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, int root, MPI_Comm comm,
                MPI_Request* handle) {
  return reduce(in, out, count, type, op, root, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Ireduce(in, out, count, type, op, root, comm, handle);
}

int MPI_Reduce_scatter_block(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  return reduce_scatter(in, out, count, type, op, comm, nullptr)
             ? MPI_SUCCESS
             : PMPI_Reduce_scatter_block(in, out, count, type, op, comm);
}
int MPI_Ireduce_scatter_block(const void* in, void* out, int count, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                              MPI_Request* handle) {
  return reduce_scatter(in, out, count, type, op, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Ireduce_scatter_block(in, out, count, type, op, comm, handle);
}
int MPI_Reduce_scatter(const void* in, void* out, const int* counts, MPI_Datatype type, MPI_Op op, MPI_Comm comm) {
  const bool is_done = are_even(counts, comm) ? reduce_scatter(in, out, counts[0], type, op, comm, nullptr)
                                              : reduce_scatter_uneven(in, out, counts, type, op, comm);
  return is_done ? MPI_SUCCESS : PMPI_Reduce_scatter(in, out, counts, type, op, comm);
}
int MPI_Ireduce_scatter(const void* in, void* out, const int* counts, MPI_Datatype type, MPI_Op op, MPI_Comm comm,
                        MPI_Request* handle) {
  return are_even(counts, comm) && reduce_scatter(in, out, counts[0], type, op, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Ireduce_scatter(in, out, counts, type, op, comm, handle);
}

int MPI_Allgather(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                  MPI_Comm comm) {
  return all_gather(in, sent, in_type, out, received, out_type, comm, nullptr)
             ? MPI_SUCCESS
             : PMPI_Allgather(in, sent, in_type, out, received, out_type, comm);
}
int MPI_Iallgather(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                   MPI_Comm comm, MPI_Request* handle) {
  return all_gather(in, sent, in_type, out, received, out_type, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Iallgather(in, sent, in_type, out, received, out_type, comm, handle);
}

int MPI_Gather(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type, int root,
               MPI_Comm comm) {
  return gather(in, sent, in_type, out, received, out_type, root, comm, nullptr)
             ? MPI_SUCCESS
             : PMPI_Gather(in, sent, in_type, out, received, out_type, root, comm);
}
int MPI_Igather(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                int root, MPI_Comm comm, MPI_Request* handle) {
  return gather(in, sent, in_type, out, received, out_type, root, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Igather(in, sent, in_type, out, received, out_type, root, comm, handle);
}

int MPI_Scatter(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                int root, MPI_Comm comm) {
  return scatter(in, sent, in_type, out, received, out_type, root, comm, nullptr)
             ? MPI_SUCCESS
             : PMPI_Scatter(in, sent, in_type, out, received, out_type, root, comm);
}
int MPI_Iscatter(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                 int root, MPI_Comm comm, MPI_Request* handle) {
  return scatter(in, sent, in_type, out, received, out_type, root, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Iscatter(in, sent, in_type, out, received, out_type, root, comm, handle);
}

int MPI_Alltoall(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                 MPI_Comm comm) {
  return all_to_all(in, sent, in_type, out, comm, nullptr)
             ? MPI_SUCCESS
             : PMPI_Alltoall(in, sent, in_type, out, received, out_type, comm);
}
int MPI_Ialltoall(const void* in, int sent, MPI_Datatype in_type, void* out, int received, MPI_Datatype out_type,
                  MPI_Comm comm, MPI_Request* handle) {
  return all_to_all(in, sent, in_type, out, comm, handle)
             ? MPI_SUCCESS
             : PMPI_Ialltoall(in, sent, in_type, out, received, out_type, comm, handle);
}

}  // extern "C"
