#pragma once

#include <mpi.h>

#include <lockstep/context.h>

// For programs that use MPI themselves. This is the only header that needs mpi.h, and lockstep.h does not include it.
// Link Lockstep::mpi, which is built against one MPI.

namespace lockstep {

/// Makes a Context of the ranks of an MPI communicator, with the same rank numbers. The ranks meet through MPI, so no
/// launcher, variable or port is needed. All ranks of the communicator must call it. It works on a duplicate
/// (MPI_Comm_dup), so the program's messages are never touched, and the program may use MPI as before. Blocks until all
/// have called it, for at most ContextOptions::join_timeout. Throws Error if MPI is not initialized or has been
/// finalized.
///
/// If ContextOptions::backend is empty, ranks of one machine share memory, and MPI carries the traffic between
/// machines. If it is "mpi", MPI carries everything. docs/several_machines.md has more.
///
/// Any thread level of MPI suffices. With MPI_THREAD_MULTIPLE any thread may use the group (one at a time, as always),
/// and asynchronous operations make progress by themselves. With less, only the thread that called this function may
/// use the group (below MPI_THREAD_SERIALIZED it must be the thread that initialized MPI); any other gets an Error.
/// Asynchronous operations then make progress between machines while that thread starts, polls or waits for an
/// operation of any group.
///
/// Destroy the Context before MPI_Finalize(). After MPI_Finalize() operations throw Error, and destroying the Context
/// does no harm. When a rank's process dies, MPI decides what happens to the others; most launchers end them.
[[nodiscard]] Context mpi_context(MPI_Comm communicator, ContextOptions options = {});

}  // namespace lockstep
