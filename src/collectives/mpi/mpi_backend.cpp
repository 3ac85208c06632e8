#include "collectives/mpi/mpi_backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/hierarchical/hierarchical_backend.h"
#include "collectives/mpi/mpi_carrier.h"
#include "collectives/shm/backend/c10d_meeting_store.h"
#include "collectives/shm/backend/make_backend.h"
#include "collectives/shm/segment/layout.h"

// The engine is the one for several machines (collectives/hierarchical), with MPI as its carrier. This file only
// determines the group's ranks in MPI and their machines. In a flat group each rank has its own machine.

namespace lockstep::mpi_engine {

c10::intrusive_ptr<c10d::Backend> make_backend(const std::shared_ptr<Pump>& pump,
                                               const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const Options& options) {
  const auto cards =
      shm_engine::exchange_over(c10::make_intrusive<c10d::PrefixStore>("where", store), rank, world_size,
                                options.join_timeout)(std::to_string(pump->rank()) + " " + options.machine);
  std::vector<int> members;
  std::vector<std::string> machines, alone;
  for (const std::string& card : cards) {
    members.push_back(std::stoi(card));
    machines.push_back(card.substr(card.find(' ')));
    alone.push_back(std::to_string(members.back()));
  }
  using hierarchical_engine::Layout;
  Layout layout = Layout::of(rank, machines);
  const int most = layout.most_on_a_machine();
  const bool together = layout.machines() == 1 && world_size <= shm::kMaxRanks && !options.flat;
  if (together && (options.one_machine || !pump->is_up_to_this_thread()))
    return shm_engine::make_backend(store, rank, world_size, options.timeout, "shm", false, options.join_timeout);
  const bool flat = options.flat || together || most == 1 || most > shm::kMaxRanks;
  if (flat) layout = Layout::of(rank, alone);
  auto endings = std::make_shared<Endings>(pump, store, rank, world_size);
  hierarchical_engine::Carriers carriers;
  using Tags = MpiCarrier::Tags;
  carriers.collectives = std::make_shared<MpiCarrier>(pump, endings, members, Tags::kEngines, options.timeout);
  carriers.messages = std::make_shared<MpiCarrier>(pump, endings, members, Tags::kPrograms, options.timeout);
  return hierarchical_engine::make_backend_over(std::move(carriers), store, layout,
                                                {options.timeout, options.join_timeout}, flat ? "mpi" : "hierarchical");
}

}  // namespace lockstep::mpi_engine
