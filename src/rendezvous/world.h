#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "base/environment.h"

namespace lockstep {

/// This process's place among the ranks, from its environment, and how the ranks can meet.
struct World {
  enum class Source { kAlone, kLauncher, kTorchrun, kOpenMpi, kMpich, kSlurm, kMpi };

  Source source = Source::kAlone;
  int rank = 0;
  int world_size = 1;
  std::optional<int> local_rank;  ///< among the ranks of this machine; unset: determined when the ranks meet
  std::optional<int> local_world_size;

  std::optional<int> store_fd;  ///< kLauncher: inherited socket to the launcher's store
  std::string address;          ///< kLauncher: of this machine, for ranks of other machines, if there are any
  std::string master_addr;      ///< address of the TCPStore, if one is needed
  int master_port = 0;
  bool store_is_hosted = false;  ///< kTorchrun: the agent serves the TCPStore; else rank 0 does
  std::string rank_variable;     ///< the variable the rank was read from, e.g. PMI_RANK
  std::string job;               ///< kTorchrun: distinguishes jobs that share a store

  /// Whether all ranks are on this machine, according to the launcher.
  bool one_machine() const {
    return source == Source::kAlone || local_world_size == world_size ||
           (source == Source::kLauncher && !local_world_size);
  }

  bool operator==(const World&) const = default;
};

/// "lockstep run", "torchrun", ...: for messages.
const char* name_of(World::Source source);

/// Reads the world from the environment. The first launcher whose variables are present decides: `lockstep run`,
/// torchrun, Open MPI, MPICH (Hydra), Slurm (inside a job step); else it is a world of one. Throws Error, naming the
/// variable, its value and what to do, if a variable is missing, is not a number or contradicts another.
World discover_world(const Environment& environment);

/// The time to wait for all ranks: the environment's value, for users who cannot change the program, otherwise the
/// program's. Throws Error if the variable is not a number of seconds above 0.
std::chrono::milliseconds join_timeout(const Environment& environment, std::chrono::milliseconds programs);

}  // namespace lockstep
