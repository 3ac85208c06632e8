// libFuzzer: any values of the variables that say where ranks come from, and any environment handed to a rank.

#include <lockstep/error.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "launch/plan.h"
#include "rendezvous/world.h"

namespace {

/// Everything that World is read from, in an order that seeds rely on.
std::vector<std::optional<std::string>*> fields_of(lockstep::Environment& e) {
  return {&e.lockstep_store_fd,
          &e.rank,
          &e.world_size,
          &e.local_rank,
          &e.local_world_size,
          &e.master_addr,
          &e.master_port,
          &e.torchelastic_use_agent_store,
          &e.torchelastic_restart_count,
          &e.torchelastic_run_id,
          &e.ompi_comm_world_rank,
          &e.ompi_comm_world_size,
          &e.ompi_comm_world_local_rank,
          &e.ompi_comm_world_local_size,
          &e.pmi_rank,
          &e.pmi_size,
          &e.mpi_localrankid,
          &e.mpi_localnranks,
          &e.slurm_step_id,
          &e.slurm_procid,
          &e.slurm_step_num_tasks,
          &e.slurm_localid,
          &e.slurm_step_num_nodes};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find('\n', start), text.size());
    lines.push_back(text.substr(start, end - start));
    start = end + 1;
  }
  return lines;
}

void check(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  const auto lines = lines_of({reinterpret_cast<const char*>(data), size});
  Environment environment;
  const auto fields = fields_of(environment);
  for (size_t i = 0; i < lines.size() && i < fields.size(); ++i)
    if (!lines[i].empty()) *fields[i] = lines[i];
  try {
    const World world = discover_world(environment);
    check(world.rank >= 0 && world.rank < world.world_size);
    check(!world.local_world_size || (*world.local_world_size >= 1 && *world.local_world_size <= world.world_size));
    check(!world.local_rank || *world.local_rank >= 0);
    check(world.master_port >= 0 && world.master_port <= 65535);
  } catch (const Error&) {
  }
  // Whatever a rank's environment holds, its place is said once, and right.
  const auto block = with_variables(rank_environment(lines, {.rank = 1, .world_size = 3}), lines);
  const auto placed = rank_environment(block, {.rank = 2, .world_size = 3});
  int places = 0;
  for (const auto& variable : placed)
    if (variable.starts_with("RANK=")) ++places;
  check(places == 1 && find_variable(placed, "RANK", "") == "2");
  return 0;
}
