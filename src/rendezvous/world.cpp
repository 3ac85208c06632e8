#include "rendezvous/world.h"

#include <charconv>
#include <cstdlib>

#include "base/error.h"

namespace lockstep {
namespace {

using Variable = std::optional<std::string>;

constexpr const char* kSetByLauncher = "the launcher sets it, so unset it or start the program with a launcher";

int parse(const char* name, const std::string& value, int minimum, int maximum,
          const char* what_to_do = kSetByLauncher) {
  int number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < minimum || number > maximum)
    throw Error(std::string(name) + "=" + value + " is not a whole number from " + std::to_string(minimum) + " to " +
                std::to_string(maximum) + "; " + what_to_do);
  return number;
}

int require(const char* name, const Variable& value, const char* because, int minimum, int maximum) {
  if (!value)
    throw Error(std::string(name) + " is not set although " + because + " is; set it, or unset " + because +
                " to run as a world of one");
  return parse(name, *value, minimum, maximum);
}

constexpr int kMaxRanks = 1 << 20;

/// The names of the four numbers that every launcher sets.
struct Names {
  const char *rank, *size, *local_rank, *local_size;
};

World read_ranks(World::Source source, const Names& names, const Variable& rank, const Variable& size,
                 const Variable& local_rank, const Variable& local_size) {
  World world;
  world.source = source;
  world.rank_variable = names.rank;
  world.world_size = require(names.size, size, names.rank, 1, kMaxRanks);
  world.rank = require(names.rank, rank, names.size, 0, kMaxRanks);
  if (world.rank >= world.world_size)
    throw Error(std::string(names.rank) + "=" + *rank + " contradicts " + names.size + "=" + *size +
                "; ranks count from 0 to size - 1, so correct the one that is wrong");
  if (local_size) {
    world.local_world_size = parse(names.local_size, *local_size, 1, kMaxRanks);
    if (*world.local_world_size > world.world_size)
      throw Error(std::string(names.local_size) + "=" + *local_size + " contradicts " + names.size + "=" + *size +
                  "; a machine cannot hold more ranks than there are");
  }
  if (local_rank) {
    world.local_rank = parse(names.local_rank, *local_rank, 0, kMaxRanks);
    if (world.local_world_size && *world.local_rank >= *world.local_world_size)
      throw Error(std::string(names.local_rank) + "=" + *local_rank + " contradicts " + names.local_size + "=" +
                  *local_size + "; local ranks count from 0 to local size - 1");
  }
  return world;
}

/// Ranks that have no store yet need an address. A world of one, or of one machine, does not.
void read_master(World& world, const Environment& environment, bool needed) {
  if (!needed) return;
  if (!environment.master_addr)
    throw Error("MASTER_ADDR is not set, but " + std::to_string(world.world_size) + " ranks need it to meet, as " +
                name_of(world.source) +
                (world.source == World::Source::kTorchrun ? " say" : " may have started them on several machines") +
                " (" + world.rank_variable +
                " is set); set it to an address of rank 0's machine that the others reach, "
                "and MASTER_PORT to a free port there");
  if (!environment.master_port)
    throw Error("MASTER_PORT is not set although MASTER_ADDR=" + *environment.master_addr +
                " is; set it to a free port of rank 0's machine");
  world.master_addr = *environment.master_addr;
  world.master_port =
      parse("MASTER_PORT", *environment.master_port, 1, 65535, "set it to a free port of rank 0's machine");
}

World from_launcher(const Environment& e) {
  if (!e.rank && !e.world_size)
    throw Error("RANK and WORLD_SIZE are not set although LOCKSTEP_STORE_FD=" + *e.lockstep_store_fd +
                " is; start the program with `lockstep run`, or unset LOCKSTEP_STORE_FD to run as a world of one");
  World world = read_ranks(World::Source::kLauncher, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, e.rank,
                           e.world_size, e.local_rank, e.local_world_size);
  world.store_fd = parse("LOCKSTEP_STORE_FD", *e.lockstep_store_fd, 0, 1 << 20);
  world.address = e.lockstep_address.value_or("");
  return world;
}

World from_torchrun(const Environment& e) {
  World world = read_ranks(World::Source::kTorchrun, {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}, e.rank,
                           e.world_size, e.local_rank, e.local_world_size);
  world.store_is_hosted = e.torchelastic_use_agent_store == "True";
  world.job = e.torchelastic_run_id.value_or("");
  read_master(world, e, world.world_size > 1);
  return world;
}

/// `srun --mpi=pmi2` also sets PMI_RANK and PMI_SIZE, with its own numbers. Hydra, which srun may have started or which
/// may use srun to start its proxies, also sets its local numbers.
bool are_slurms_pmi(const Environment& e) {
  return e.slurm_step_id && e.slurm_procid && e.pmi_rank == e.slurm_procid && e.pmi_size == e.slurm_step_num_tasks &&
         !e.mpi_localrankid && !e.mpi_localnranks;
}

World from_mpi_like(World::Source source, const Names& names, const Variable& rank, const Variable& size,
                    const Variable& local_rank, const Variable& local_size, const Environment& e) {
  World world = read_ranks(source, names, rank, size, local_rank, local_size);
  read_master(world, e, !world.one_machine());
  return world;
}

}  // namespace

const char* name_of(World::Source source) {
  switch (source) {
    case World::Source::kAlone:
      return "a world of one";
    case World::Source::kLauncher:
      return "lockstep run";
    case World::Source::kTorchrun:
      return "torchrun's variables";
    case World::Source::kOpenMpi:
      return "Open MPI";
    case World::Source::kMpich:
      return "MPICH";
    case World::Source::kSlurm:
      return "Slurm";
    case World::Source::kMpi:
      return "an MPI communicator";
  }
  return "?";
}

World discover_world(const Environment& e) {
  if (e.lockstep_store_fd) return from_launcher(e);
  if (e.rank || e.world_size) return from_torchrun(e);
  if (e.ompi_comm_world_rank || e.ompi_comm_world_size)
    return from_mpi_like(
        World::Source::kOpenMpi,
        {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
        e.ompi_comm_world_rank, e.ompi_comm_world_size, e.ompi_comm_world_local_rank, e.ompi_comm_world_local_size, e);
  if ((e.pmi_rank || e.pmi_size) && !are_slurms_pmi(e))
    return from_mpi_like(World::Source::kMpich, {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
                         e.pmi_rank, e.pmi_size, e.mpi_localrankid, e.mpi_localnranks, e);
  // A batch script also sees SLURM_PROCID; only a step (srun) has started ranks.
  if (e.slurm_step_id && e.slurm_procid)
    return from_mpi_like(World::Source::kSlurm,
                         {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"},
                         e.slurm_procid, e.slurm_step_num_tasks, e.slurm_localid,
                         e.slurm_step_num_nodes == "1" ? e.slurm_step_num_tasks : std::nullopt, e);
  return {};
}

std::chrono::milliseconds join_timeout(const Environment& environment, std::chrono::milliseconds programs) {
  if (!environment.lockstep_join_timeout_s) return programs;
  char* end = nullptr;
  const double seconds = std::strtod(environment.lockstep_join_timeout_s->c_str(), &end);
  if (*end != '\0' || !(seconds > 0 && seconds < 1e6))
    throw Error("LOCKSTEP_JOIN_TIMEOUT_S=" + *environment.lockstep_join_timeout_s +
                " is not a number of seconds above 0; set it to one, or unset it");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace lockstep
