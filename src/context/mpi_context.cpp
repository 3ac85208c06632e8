#include <lockstep/mpi.h>

#include <utility>

#include "base/error.h"
#include "base/machine_name.h"
#include "collectives/mpi/mpi_backend.h"
#include "collectives/mpi/mpi_port.h"
#include "collectives/mpi/mpi_store.h"
#include "context/adopted_ranks.h"

namespace lockstep {
namespace {

/// The factory of the group of all ranks and of subgroups.
BackendFactory choose_engine(const std::shared_ptr<mpi_engine::Pump>& pump, const ContextOptions& options,
                             bool one_machine) {
  const std::string& backend = options.backend;
  if (!backend.empty() && backend != "shm" && backend != "hierarchical" && backend != "mpi")
    throw Error("ContextOptions::backend is \"" + backend +
                "\"; the ranks of an MPI communicator have \"shm\", \"hierarchical\" or \"mpi\", or leave it empty");
  if (backend == "shm" && !one_machine)
    throw Error(
        "ContextOptions::backend is \"shm\", but the ranks of the communicator are on several machines; leave it "
        "empty, and MPI will carry the messages between machines");
  const mpi_engine::Options how{.machine = machine_name(),
                                .flat = backend == "mpi",
                                .one_machine = one_machine,
                                .timeout = options.collective_timeout,
                                .join_timeout = options.join_timeout};
  return [pump, how](const auto& store, int rank, int world_size) {
    return mpi_engine::make_backend(pump, store, rank, world_size, how);
  };
}

}  // namespace

Context mpi_context(MPI_Comm communicator, ContextOptions options) {
  const auto timeout = join_timeout_of(options);
  auto pump = std::make_shared<mpi_engine::Pump>(mpi_engine::open_port(communicator, timeout));
  auto store = c10::make_intrusive<mpi_engine::MpiStore>(pump, timeout);
  const auto engine = [pump](const ContextOptions& chosen, bool one_machine) {
    return choose_engine(pump, chosen, one_machine);
  };
  const auto say_farewell = [pump](std::chrono::milliseconds wait) { pump->say_farewell(wait); };
  return adopt_ranks({pump->rank(), pump->world_size(), std::move(store), engine, say_farewell}, std::move(options));
}

}  // namespace lockstep
