#pragma once

#include <mpi.h>

#include <lockstep/context.h>

// For programs that use MPI themselves. This is the only header that needs mpi.h, and lockstep.h does not include it;
// link Lockstep::mpi, which is built against one MPI.

namespace lockstep {

/// The ranks of a communicator that the program has, as a Context: a rank's number is its number there. Nothing else is
/// needed, no launcher, no variable, no port: the ranks meet through MPI. All ranks of the communicator must call it;
/// like MPI_Comm_dup it works on a duplicate, so the program's messages are never touched, and the program may use MPI
/// as before. Blocks until all have called, at most ContextOptions::join_timeout. Throws Error if MPI is not
/// initialized or has been finalized.
///
/// ContextOptions::backend empty: ranks of one machine share memory, and MPI carries what goes from machine to machine;
/// "mpi": MPI carries everything. docs/several_machines.md has more.
///
/// Threads: whatever MPI was initialized for suffices. With MPI_THREAD_MULTIPLE the group may be used by any thread
/// (one at a time, as always), and asynchronous operations make progress by themselves. With less, only the thread that
/// called this may use the group (below MPI_THREAD_SERIALIZED it must be the one that initialized MPI); another one
/// gets an Error. Asynchronous operations then make progress between machines while that thread starts, polls or waits
/// for an operation of any group.
///
/// Let the Context's scope end before MPI_Finalize(). After MPI_Finalize() operations throw Error, and destroying it
/// does no harm. MPI decides what becomes of the others when a rank's process dies; most launchers end them.
[[nodiscard]] Context mpi_context(MPI_Comm communicator, ContextOptions options = {});

}  // namespace lockstep
