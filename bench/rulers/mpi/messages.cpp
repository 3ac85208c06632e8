// Messages between two ranks, and what waits for requests.

#include "world.h"

namespace lockstep::rulers {
namespace {

/// A message to oneself, or to nobody, is the MPI's; so is one of a type that Lockstep does not know.
bool is_message_of_ours(MPI_Comm comm, const Type& type, int other) {
  const bool ours = is_ours(comm) && type.bytes != 0 && other != MPI_PROC_NULL && other != lockstep_rank(world);
  if (world != nullptr) ++(ours ? calls.by_lockstep : calls.by_mpi);
  return ours;
}

int tag_of(int tag) {
  if (tag == MPI_ANY_TAG) give_up("MPI_Recv", "Lockstep has no MPI_ANY_TAG");
  return tag;
}

bool send(const void* data, int count, MPI_Datatype datatype, int to, int tag, MPI_Comm comm, MPI_Request* handle) {
  const Type type = type_of(datatype);
  if (!is_message_of_ours(comm, type, to)) return false;
  lockstep_request** const request = handle != nullptr ? &new_pending(handle).request : nullptr;
  check(lockstep_send(world, data, count * type.bytes, LOCKSTEP_UINT8, to, tag, request), "MPI_Send");
  return true;
}

bool receive(void* data, int count, MPI_Datatype datatype, int from, int tag, MPI_Comm comm, MPI_Status* status,
             MPI_Request* handle) {
  const Type type = type_of(datatype);
  if (!is_message_of_ours(comm, type, from)) return false;
  const int64_t bytes = count * type.bytes;
  const int sender = from == MPI_ANY_SOURCE ? LOCKSTEP_ANY_RANK : from;
  if (handle != nullptr) {
    Pending& pending = new_pending(handle);
    pending.is_receive = true;
    pending.tag = tag;
    pending.bytes = bytes;
    check(lockstep_recv(world, data, bytes, LOCKSTEP_UINT8, sender, tag_of(tag), &pending.source, &pending.request),
          "MPI_Irecv");
    return true;
  }
  int source = from;
  check(lockstep_recv(world, data, bytes, LOCKSTEP_UINT8, sender, tag_of(tag), &source, nullptr), "MPI_Recv");
  fill_status(status, source, tag, bytes);
  return true;
}

bool is_done(Pending& pending) {
  int done = 0;
  check(lockstep_test(pending.request, &done), "MPI_Test");
  return done != 0;
}

void finish(Pending& pending, MPI_Request* handle, MPI_Status* status) {
  check(lockstep_wait(&pending.request, -1), "MPI_Wait");
  if (pending.is_receive)
    fill_status(status, pending.source, pending.tag, pending.bytes);
  else
    fill_status(status, MPI_PROC_NULL, MPI_ANY_TAG, 0);
  pending.is_used = false;
  *handle = MPI_REQUEST_NULL;
}

MPI_Status* status_of(MPI_Status* statuses, int index) {
  return statuses == MPI_STATUSES_IGNORE ? MPI_STATUS_IGNORE : statuses + index;
}

/// Whether the request is done, without ending it.
bool is_done(MPI_Request handle) {
  if (Pending* const pending = pending_of(handle)) return is_done(*pending);
  int done = 0;
  PMPI_Request_get_status(handle, &done, MPI_STATUS_IGNORE);
  return done != 0;
}

bool has_ours(int count, const MPI_Request* handles) {
  for (int i = 0; i < count; ++i)
    if (pending_of(handles[i]) != nullptr) return true;
  return false;
}

/// The first request that is done, MPI_UNDEFINED if none is; -1 while all are in flight.
int first_done(int count, const MPI_Request* handles) {
  bool are_all_null = true;
  for (int i = 0; i < count; ++i) {
    if (handles[i] == MPI_REQUEST_NULL) continue;
    are_all_null = false;
    if (is_done(handles[i])) return i;
  }
  return are_all_null ? MPI_UNDEFINED : -1;
}

}  // namespace
}  // namespace lockstep::rulers

using namespace lockstep::rulers;

extern "C" {

int MPI_Send(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
  return send(data, count, type, to, tag, comm, nullptr) ? MPI_SUCCESS : PMPI_Send(data, count, type, to, tag, comm);
}
int MPI_Ssend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm) {
  return send(data, count, type, to, tag, comm, nullptr) ? MPI_SUCCESS : PMPI_Ssend(data, count, type, to, tag, comm);
}
int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request* handle) {
  return send(data, count, type, to, tag, comm, handle) ? MPI_SUCCESS
                                                        : PMPI_Isend(data, count, type, to, tag, comm, handle);
}
int MPI_Recv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Status* status) {
  return receive(data, count, type, from, tag, comm, status, nullptr)
             ? MPI_SUCCESS
             : PMPI_Recv(data, count, type, from, tag, comm, status);
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request* handle) {
  return receive(data, count, type, from, tag, comm, MPI_STATUS_IGNORE, handle)
             ? MPI_SUCCESS
             : PMPI_Irecv(data, count, type, from, tag, comm, handle);
}
int MPI_Sendrecv(const void* in, int sent, MPI_Datatype in_type, int to, int in_tag, void* out, int received,
                 MPI_Datatype out_type, int from, int out_tag, MPI_Comm comm, MPI_Status* status) {
  MPI_Request requests[2];
  MPI_Irecv(out, received, out_type, from, out_tag, comm, &requests[0]);
  MPI_Isend(in, sent, in_type, to, in_tag, comm, &requests[1]);
  MPI_Wait(&requests[1], MPI_STATUS_IGNORE);
  return MPI_Wait(&requests[0], status);
}

int MPI_Wait(MPI_Request* handle, MPI_Status* status) {
  Pending* const pending = pending_of(*handle);
  if (pending == nullptr) return PMPI_Wait(handle, status);
  finish(*pending, handle, status);
  return MPI_SUCCESS;
}
int MPI_Waitall(int count, MPI_Request* handles, MPI_Status* statuses) {
  if (!has_ours(count, handles)) return PMPI_Waitall(count, handles, statuses);
  for (int i = 0; i < count; ++i) MPI_Wait(&handles[i], status_of(statuses, i));
  return MPI_SUCCESS;
}
int MPI_Waitany(int count, MPI_Request* handles, int* index, MPI_Status* status) {
  if (!has_ours(count, handles)) return PMPI_Waitany(count, handles, index, status);
  do *index = first_done(count, handles);
  while (*index == -1);
  return MPI_Wait(&handles[*index], status);
}
int MPI_Waitsome(int count, MPI_Request* handles, int* done, int* indices, MPI_Status* statuses) {
  if (!has_ours(count, handles)) return PMPI_Waitsome(count, handles, done, indices, statuses);
  *done = 1;
  return MPI_Waitany(count, handles, &indices[0], status_of(statuses, 0));
}
int MPI_Test(MPI_Request* handle, int* done, MPI_Status* status) {
  Pending* const pending = pending_of(*handle);
  if (pending == nullptr) return PMPI_Test(handle, done, status);
  *done = is_done(*pending) ? 1 : 0;
  if (*done != 0) finish(*pending, handle, status);
  return MPI_SUCCESS;
}
int MPI_Testall(int count, MPI_Request* handles, int* done, MPI_Status* statuses) {
  if (!has_ours(count, handles)) return PMPI_Testall(count, handles, done, statuses);
  *done = 1;
  for (int i = 0; i < count; ++i) *done = is_done(handles[i]) && *done != 0 ? 1 : 0;
  return *done != 0 ? MPI_Waitall(count, handles, statuses) : MPI_SUCCESS;
}
int MPI_Testany(int count, MPI_Request* handles, int* index, int* done, MPI_Status* status) {
  if (!has_ours(count, handles)) return PMPI_Testany(count, handles, index, done, status);
  *index = first_done(count, handles);
  *done = *index != -1 ? 1 : 0;
  if (*done == 0) *index = MPI_UNDEFINED;
  return *done != 0 ? MPI_Wait(&handles[*index], status) : MPI_SUCCESS;
}

// What a message of Lockstep's does not know.
int MPI_Probe(int from, int tag, MPI_Comm comm, MPI_Status* status) {
  if (is_ours(comm)) give_up("MPI_Probe", "messages of Lockstep's are not probed");
  return PMPI_Probe(from, tag, comm, status);
}
int MPI_Iprobe(int from, int tag, MPI_Comm comm, int* there, MPI_Status* status) {
  if (is_ours(comm)) give_up("MPI_Iprobe", "messages of Lockstep's are not probed");
  return PMPI_Iprobe(from, tag, comm, there, status);
}
int MPI_Cancel(MPI_Request* handle) {
  if (pending_of(*handle) != nullptr) give_up("MPI_Cancel", "a request of Lockstep's cannot be cancelled");
  return PMPI_Cancel(handle);
}
int MPI_Request_free(MPI_Request* handle) {
  if (pending_of(*handle) != nullptr) give_up("MPI_Request_free", "a request of Lockstep's needs a wait");
  return PMPI_Request_free(handle);
}

}  // extern "C"
