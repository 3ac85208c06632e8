#pragma once

#include <mpi.h>

#include <chrono>
#include <memory>

#include "collectives/mpi/port.h"

namespace lockstep::mpi_engine {

/// A Port over a duplicate of `communicator`. Throws Error if MPI is not initialized or has been finalized, or if some
/// ranks are missing at the timeout.
/// REQUIRES: all its ranks call it, on a thread that may call MPI.
std::unique_ptr<Port> open_port(MPI_Comm communicator, std::chrono::milliseconds timeout);

}  // namespace lockstep::mpi_engine
