#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "launch/process/numa.h"

namespace lockstep {

/// What a program that started ranks is told when they fail.
struct RunFailure {
  int exit_code = 0;
  int rank = -1;     ///< the culprit; -1: none is known
  std::string what;  ///< its own words (an exception's text), or how it ended
};

/// Which processors a rank may run on.
enum class Binding {
  kNone,  ///< all that the launcher may use
  kCore,  ///< its own share of them, which no other rank has
  kNuma,  ///< those of its NUMA node, whose memory it takes first
};

/// What was asked for on the command line of `lockstep run`.
struct LaunchOptions {
  int ranks = 1;
  Binding bind = Binding::kNone;
  int max_restarts = 0;
  std::chrono::milliseconds hang_timeout{300000};  ///< kNever: a hang ends nothing
  std::string run_dir;                             ///< empty: a new folder under runs/
  std::string program;                             ///< path to execute; empty: found by command[0]
  std::vector<std::string> command;                ///< program and arguments, the program as it was given
  std::chrono::milliseconds grace{5000};           ///< between asking the ranks to stop and killing them
  std::vector<int> shown_ranks = {0};              ///< whose output comes to the terminal, ascending
  std::optional<int> debugged_rank;                ///< it runs under a debugger, on the terminal

  // Of lockstep::spawn, whose ranks belong to a program.
  bool in_process = false;  ///< no folder; the ranks write where the launcher does; nothing is said
  std::function<void(const RunFailure&)> on_failure;  ///< told of a failure instead of the terminal
};

/// Longer than any wait that is to end; as milliseconds it still fits an int.
constexpr std::chrono::milliseconds kNever = std::chrono::hours(24 * 7);

/// An environment as exec takes it: NAME=value.
using EnvironmentBlock = std::vector<std::string>;

/// One rank's place in a run on one machine.
struct RankPlace {
  int rank = 0;
  int world_size = 1;
  std::string run_dir;
  int store_fd = -1;       ///< the number under which the rank inherits its socket to the store
  int page_fd = -1;        ///< the number under which it inherits the board of pages; -1: there is none
  std::string error_file;  ///< where it may write what ends it, in torchrun's form
  int restarts = 0;        ///< made before
  int max_restarts = 0;
  int master_port = 0;                  ///< for programs that meet by torchrun's variables
  std::string run_id;                   ///< the same for all ranks and restarts
  int threads = 0;                      ///< its share of the cores; 0: not said
  bool debugged = false;                ///< one of the ranks is: waiting must not end by time
  std::optional<int> terminal_columns;  ///< where the rank's output ends on a terminal
};

/// Of a new run, told from others by time and process.
std::string new_run_id(std::chrono::system_clock::time_point now, int pid);

/// `inherited` with the variables that tell a rank its place. Stale ones of another launcher are replaced, and those
/// that would lead the rank to another launcher's rendezvous (MASTER_ADDR and so on) are removed. A number of threads
/// that is there stays, unless a launcher of ours around this one has set it.
EnvironmentBlock rank_environment(const EnvironmentBlock& inherited, const RankPlace& place);

/// The value of `name`, or `fallback`.
std::string find_variable(const EnvironmentBlock& environment, const std::string& name, const std::string& fallback);

/// Whether the launcher sets variables of this name itself, or takes them out.
bool is_launchers_variable(const std::string& name);

/// `environment` with `variables` in it, which replace those of the same name.
EnvironmentBlock with_variables(const EnvironmentBlock& environment, const EnvironmentBlock& variables);

/// What `option` (-n) says: a whole number from 1 on; "auto" or torchrun's "cpu", the usable cores; or "gpu", the GPUs,
/// of which there must be one. Throws LaunchError (bad command line).
int parse_rank_count(const std::string& option, const std::string& text, int usable_cores, int gpus = 0);

/// The path to execute for `name`: itself where it has a slash, else its first match in `search_path`. Throws
/// LaunchError (not started) that says what was looked for, and where.
std::string find_program(const std::string& name, const std::string& search_path);

/// Name of a new run's folder: runs/20240131-235959-train-4711.
std::string default_run_dir(const std::string& program, std::chrono::system_clock::time_point now, int pid);

/// Where one rank computes.
struct Placement {
  std::vector<int> cpus;  ///< empty: it is not bound
  int memory_node = -1;   ///< the NUMA node whose memory it takes first; -1: as the kernel sees fit
};

/// Where a rank computes, out of the CPUs that the launcher may use. kCore: a share is contiguous, all are equally
/// large and what is over stays free; throws LaunchError (bad command line) when there are more ranks than CPUs to have
/// one each. kNuma: ranks that follow each other share a node, or a rank has several nodes where there are more of
/// them; with one usable node nothing is bound.
Placement place_rank(Binding bind, const std::vector<int>& cpus, const std::vector<NumaNode>& nodes, int rank,
                     int ranks);

/// `nodes` with only those of `cpus`, without nodes that have none of them.
std::vector<NumaNode> usable_nodes(std::vector<NumaNode> nodes, const std::vector<int>& cpus);

/// A warning when there are more ranks than usable cores, else empty.
std::string crowding_warning(int ranks, int usable_cores, int threads_per_rank);

}  // namespace lockstep
