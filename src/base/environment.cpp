#include "base/environment.h"

#include <cstdlib>

#include "base/island_variables.h"

namespace lockstep {
namespace {

std::optional<std::string> read(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

}  // namespace

Environment Environment::from_process() {
  return {
      .lockstep_store_fd = read("LOCKSTEP_STORE_FD"),
      .lockstep_address = read("LOCKSTEP_ADDRESS"),
      .lockstep_page_fd = read("LOCKSTEP_PAGE_FD"),
      .lockstep_memory_fd = read("LOCKSTEP_MEMORY_FD"),
      .lockstep_run_dir = read("LOCKSTEP_RUN_DIR"),
      .lockstep_terminal = read("LOCKSTEP_TERMINAL"),
      .lockstep_threads = read("LOCKSTEP_THREADS"),
      .lockstep_spawn = read("LOCKSTEP_SPAWN"),
      .lockstep_debugged = read("LOCKSTEP_DEBUGGED"),
      .rank = read("RANK"),
      .world_size = read("WORLD_SIZE"),
      .local_rank = read("LOCAL_RANK"),
      .local_world_size = read("LOCAL_WORLD_SIZE"),
      .master_addr = read("MASTER_ADDR"),
      .master_port = read("MASTER_PORT"),
      .torchelastic_use_agent_store = read("TORCHELASTIC_USE_AGENT_STORE"),
      .torchelastic_restart_count = read("TORCHELASTIC_RESTART_COUNT"),
      .torchelastic_error_file = read("TORCHELASTIC_ERROR_FILE"),
      .torchelastic_run_id = read("TORCHELASTIC_RUN_ID"),
      .ompi_comm_world_rank = read("OMPI_COMM_WORLD_RANK"),
      .ompi_comm_world_size = read("OMPI_COMM_WORLD_SIZE"),
      .ompi_comm_world_local_rank = read("OMPI_COMM_WORLD_LOCAL_RANK"),
      .ompi_comm_world_local_size = read("OMPI_COMM_WORLD_LOCAL_SIZE"),
      .pmi_rank = read("PMI_RANK"),
      .pmi_size = read("PMI_SIZE"),
      .mpi_localrankid = read("MPI_LOCALRANKID"),
      .mpi_localnranks = read("MPI_LOCALNRANKS"),
      .slurm_step_id = read("SLURM_STEP_ID"),
      .slurm_procid = read("SLURM_PROCID"),
      .slurm_step_num_tasks = read("SLURM_STEP_NUM_TASKS"),
      .slurm_localid = read("SLURM_LOCALID"),
      .slurm_step_num_nodes = read("SLURM_STEP_NUM_NODES"),
      .omp_num_threads = read("OMP_NUM_THREADS"),
      .lockstep_virtual_ranks = read("LOCKSTEP_VIRTUAL_RANKS"),
      .lockstep_join_timeout_s = read("LOCKSTEP_JOIN_TIMEOUT_S"),
      .lockstep_machine = read("LOCKSTEP_MACHINE"),
      .malloc_trim_threshold_ = read("MALLOC_TRIM_THRESHOLD_"),
      .malloc_mmap_threshold_ = read("MALLOC_MMAP_THRESHOLD_"),
      .glibc_tunables = read("GLIBC_TUNABLES"),
      .aten_cpu_capability = read("ATEN_CPU_CAPABILITY"),
      .mkl_cbwr = read("MKL_CBWR"),
      .onednn_max_cpu_isa = read("ONEDNN_MAX_CPU_ISA"),
      .lockstep_nightly = read("LOCKSTEP_NIGHTLY"),
      .lockstep_fuzz_seed = read("LOCKSTEP_FUZZ_SEED"),
  };
}

IslandVariables IslandVariables::from_process() { return {.lockstep_island = read("LOCKSTEP_ISLAND")}; }

}  // namespace lockstep
