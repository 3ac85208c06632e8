#pragma once

#include <optional>
#include <string>

namespace lockstep {

/// Every environment variable that Lockstep reads, one field each, under its own name in lower case. Empty: unset.
/// Nothing else in the project calls getenv.
struct Environment {
  // Set by `lockstep run` for its ranks.
  std::optional<std::string> lockstep_store_fd;   ///< inherited socket to the launcher's key-value store
  std::optional<std::string> lockstep_address;    ///< of this machine, to which ranks of the other machines connect
  std::optional<std::string> lockstep_page_fd;    ///< inherited memory in which ranks report to the launcher
  std::optional<std::string> lockstep_memory_fd;  ///< inherited memory for checkpoints, which outlives the ranks
  std::optional<std::string> lockstep_run_dir;    ///< folder of this run's files
  std::optional<std::string> lockstep_terminal;   ///< columns of the launcher's terminal, where rank 0's output ends
  std::optional<std::string> lockstep_threads;    ///< the value to which it has set OMP_NUM_THREADS
  std::optional<std::string> lockstep_spawn;      ///< the call of lockstep::spawn of which this process is a rank
  std::optional<std::string> lockstep_debugged;   ///< a rank is under a debugger: no wait times out

  // torchrun's names, also set by `lockstep run`.
  std::optional<std::string> rank;
  std::optional<std::string> world_size;
  std::optional<std::string> local_rank;
  std::optional<std::string> local_world_size;
  std::optional<std::string> master_addr;
  std::optional<std::string> master_port;
  std::optional<std::string> torchelastic_use_agent_store;
  std::optional<std::string> torchelastic_restart_count;
  std::optional<std::string> torchelastic_error_file;
  std::optional<std::string> torchelastic_run_id;

  // Open MPI.
  std::optional<std::string> ompi_comm_world_rank;
  std::optional<std::string> ompi_comm_world_size;
  std::optional<std::string> ompi_comm_world_local_rank;
  std::optional<std::string> ompi_comm_world_local_size;

  // MPICH and its relatives (Hydra).
  std::optional<std::string> pmi_rank;
  std::optional<std::string> pmi_size;
  std::optional<std::string> mpi_localrankid;
  std::optional<std::string> mpi_localnranks;

  // Slurm, inside a job step (srun).
  std::optional<std::string> slurm_step_id;
  std::optional<std::string> slurm_procid;
  std::optional<std::string> slurm_step_num_tasks;
  std::optional<std::string> slurm_localid;
  std::optional<std::string> slurm_step_num_nodes;

  std::optional<std::string> omp_num_threads;
  std::optional<std::string> lockstep_virtual_ranks;
  std::optional<std::string> lockstep_join_timeout_s;  ///< seconds to wait for all ranks to appear

  std::optional<std::string> lockstep_machine;  ///< ranks where it differs do not share memory

  // Of glibc's malloc.
  std::optional<std::string> malloc_trim_threshold_;
  std::optional<std::string> malloc_mmap_threshold_;
  std::optional<std::string> glibc_tunables;

  // Of LibTorch and its libraries; they select the instructions that operators use.
  std::optional<std::string> aten_cpu_capability;
  std::optional<std::string> mkl_cbwr;
  std::optional<std::string> onednn_max_cpu_isa;

  // For tests.
  std::optional<std::string> lockstep_nightly;    ///< set: run the long versions
  std::optional<std::string> lockstep_fuzz_seed;  ///< the one schedule to try, as printed by a failed run

  static Environment from_process();
};

}  // namespace lockstep
