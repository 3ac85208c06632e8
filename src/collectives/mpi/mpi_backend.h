#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/mpi/pump.h"

namespace lockstep::mpi_engine {

struct Options {
  std::string machine;                     ///< the name of this rank's machine, the same on all ranks that share memory
  bool flat;                               ///< every rank counts as having its own machine
  bool one_machine;                        ///< all ranks of the program share memory
  std::chrono::milliseconds timeout;       ///< of an operation
  std::chrono::milliseconds join_timeout;  ///< of forming the group
};

/// Collectives for CPU tensors over MPI: between machines, and through shared memory within a machine unless `flat`.
/// Blocks until the group is formed. `store` is an MpiStore with the group's own prefix. Ranks that are all on one
/// machine use shared memory alone; a subgroup does so only if MPI allows any thread, since a thread that waits in
/// shared memory moves no messages.
/// REQUIRES: every rank of the group calls it, on a thread that may call MPI.
c10::intrusive_ptr<c10d::Backend> make_backend(const std::shared_ptr<Pump>& pump,
                                               const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const Options& options);

}  // namespace lockstep::mpi_engine
