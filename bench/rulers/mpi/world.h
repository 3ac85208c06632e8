#pragma once

#include <cstdint>

#include <lockstep/c.h>
#include <mpi.h>

// What the files of this library share: the group, what MPI's types and operations are for Lockstep, and requests. All
// of it belongs to the thread that calls MPI.
namespace lockstep::rulers {

/// All ranks of MPI_COMM_WORLD; null before MPI_Init and after MPI_Finalize.
extern lockstep_group* world;
/// MPI_COMM_WORLD's ranks are Lockstep's. Other communicators are left to the MPI.
inline bool is_ours(MPI_Comm communicator) { return world != nullptr && communicator == MPI_COMM_WORLD; }

void join_world();
void leave_world();

/// How many of the program's calls were answered by Lockstep, and how many of the same kinds by the MPI.
struct Calls {
  int64_t by_lockstep = 0, by_mpi = 0;
};
extern Calls calls;

/// Ends the program on every rank if `status` is not LOCKSTEP_OK.
void check(lockstep_status status, const char* call);
[[noreturn]] void give_up(const char* call, const char* why);

/// One of MPI's types for numbers.
struct Type {
  int64_t bytes = 0;  ///< 0: not one that Lockstep knows
  lockstep_dtype dtype = LOCKSTEP_UINT8;
  bool is_unsigned = false;  ///< beyond 8 bits: as a signed type of Lockstep's, for which less and greater differ
  bool is_integer = true;
};
Type type_of(MPI_Datatype datatype);

/// Whether Lockstep reduces elements of `type` by `op`; if so, writes its name for it.
bool can_reduce(const Type& type, MPI_Op op, lockstep_op* named);

/// A request of Lockstep's behind a handle of MPI's.
struct Pending {
  lockstep_request* request = nullptr;
  bool is_used = false;
  bool is_receive = false;
  int source = MPI_PROC_NULL, tag = MPI_ANY_TAG;  ///< of a receive
  int64_t bytes = 0;
};
/// A free one, with its handle.
Pending& new_pending(MPI_Request* handle);
/// Null if the handle is the MPI's own.
Pending* pending_of(MPI_Request handle);

void fill_status(MPI_Status* status, int source, int tag, int64_t bytes);

}  // namespace lockstep::rulers
