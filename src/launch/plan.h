#pragma once

#include <chrono>
#include <climits>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/option_values.h"
#include "launch/process/numa.h"

namespace lockstep {

/// The failure of a run, for a program that started ranks.
struct RunFailure {
  int exit_code = 0;
  int rank = -1;     ///< the culprit; -1: none known
  std::string what;  ///< its own words (an exception's text), or the way it ended
};

/// The CPUs on which a rank may run.
enum class Binding {
  kNone,  ///< all CPUs that the launcher may use
  kCore,  ///< a share of them that no other rank has
  kNuma,  ///< the CPUs of its NUMA node, whose memory it takes first
};

constexpr int kMaxRanks = 4096;  ///< far above any machine; catches a typing error

/// As a number of restarts: no limit.
constexpr int kAnyNumber = INT_MAX;

struct LaunchOptions {
  int ranks = 1;  ///< initially, if the run is elastic
  Binding bind = Binding::kNone;
  int max_restarts = 0;                            ///< after failures, in total; kAnyNumber: no limit
  int restarts_per_hour = kAnyNumber;              ///< out of max_restarts
  std::optional<RankRange> elastic;                ///< allowed numbers of ranks; empty: `ranks`, always
  std::chrono::milliseconds hang_timeout{300000};  ///< kNever: a hang ends nothing
  std::string run_dir;                             ///< empty: a new folder under runs/
  std::string program;                             ///< path to execute; empty: found by command[0]
  std::vector<std::string> command;                ///< program and arguments, with the program as given
  std::chrono::milliseconds grace{5000};           ///< from asking the ranks to stop until killing them
  std::vector<int> shown_ranks = {0};              ///< ranks shown on the terminal, ascending
  std::optional<int> debugged_rank;                ///< the rank that runs under a debugger, on the terminal

  // For lockstep::spawn, whose ranks belong to a program.
  bool in_process = false;  ///< no folder, no messages; the ranks write where the launcher does
  std::function<void(const RunFailure&)> on_failure;  ///< called for a failure, which is then not printed
};

/// Longer than any wait that is meant to end; fits an int in milliseconds.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 7);

/// An environment in exec's form: NAME=value.
using EnvironmentBlock = std::vector<std::string>;

struct RankPlace {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< among the ranks of its machine
  int local_world_size = 0;  ///< 0: all ranks are on one machine, and local_rank is the rank
  int node = 0;              ///< the number of its machine
  int nodes = 1;
  std::string address;  ///< of its machine, for connections from the others; empty: all ranks are here
  std::string run_dir;
  int store_fd = -1;       ///< the number under which the rank inherits its socket to the store
  int page_fd = -1;        ///< the number under which it inherits the board of pages; -1: none
  int memory_fd = -1;      ///< the number under which it inherits the memory for checkpoints; -1: none
  std::string error_file;  ///< for the error that ends it, in torchrun's form
  int restarts = 0;        ///< made before
  int max_restarts = 0;
  std::string master_address;  ///< for programs that meet by torchrun's variables; empty: 127.0.0.1
  int master_port = 0;
  std::string run_id;                   ///< the same for all ranks and restarts
  std::string mark;                     ///< Guard::mark(); empty: none
  int threads = 0;                      ///< its share of the cores; 0: not set
  bool debugged = false;                ///< one of the ranks is debugged: waits must not time out
  std::optional<int> terminal_columns;  ///< if the rank's output is shown on a terminal
};

/// The id of a new run, unique by time and process.
std::string new_run_id(std::chrono::system_clock::time_point now, int pid);

/// `inherited` with the variables that tell a rank its place. Replaces stale ones of another launcher, and removes
/// those that would lead the rank to another launcher's rendezvous (MASTER_ADDR and so on). A number of threads that is
/// already set stays, unless an outer `lockstep run` has set it.
EnvironmentBlock rank_environment(const EnvironmentBlock& inherited, const RankPlace& place);

std::string find_variable(const EnvironmentBlock& environment, const std::string& name, const std::string& fallback);

/// Whether the launcher itself sets or removes this variable.
bool is_launchers_variable(const std::string& name);

/// `environment` with `variables` added, replacing those of the same name.
EnvironmentBlock with_variables(const EnvironmentBlock& environment, const EnvironmentBlock& variables);

/// The value of `option` (-n): a positive integer; "auto" or torchrun's "cpu", the usable cores; or "gpu", the GPUs, of
/// which there must be at least one. Throws LaunchError (bad command line).
int parse_rank_count(const std::string& option, const std::string& text, int usable_cores, int gpus = 0);

/// The path to execute for `name`: `name` itself if it has a slash, else its first match in `search_path`. Throws
/// LaunchError (not started), naming what was searched for, and where.
std::string find_program(const std::string& name, const std::string& search_path);

/// The folder of a new run: runs/20240131-235959-train-4711.
std::string default_run_dir(const std::string& program, std::chrono::system_clock::time_point now, int pid);

/// The CPUs and the memory of one rank.
struct Placement {
  std::vector<int> cpus;  ///< empty: not bound
  int memory_node = -1;   ///< the NUMA node whose memory it takes first; -1: the kernel decides
};

/// Places a rank on CPUs that the launcher may use. kCore: shares are contiguous and equally large, and remaining CPUs
/// stay free; throws LaunchError (bad command line) if there are more ranks than CPUs. kNuma: consecutive ranks share a
/// node, or a rank has several nodes if there are more nodes than ranks; with one usable node nothing is bound.
Placement place_rank(Binding bind, const std::vector<int>& cpus, const std::vector<NumaNode>& nodes, int rank,
                     int ranks);

/// `nodes` with only the CPUs in `cpus`, without nodes that have none of them.
std::vector<NumaNode> usable_nodes(std::vector<NumaNode> nodes, const std::vector<int>& cpus);

/// A warning if there are more ranks than usable cores, else empty.
std::string oversubscription_warning(int ranks, int usable_cores, int threads_per_rank);

}  // namespace lockstep
