#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// Which processors a rank may run on.
enum class Binding {
  kNone,  ///< all that the launcher may use
  kCore,  ///< its own share of them, which no other rank has
};

/// What was asked for on the command line of `lockstep run`.
struct LaunchOptions {
  int ranks = 1;
  Binding bind = Binding::kNone;
  std::string run_dir;                    ///< empty: a new folder under runs/
  std::vector<std::string> command;       ///< program and arguments, the program as it was given
  std::chrono::milliseconds grace{5000};  ///< between asking the ranks to stop and killing them
};

/// An environment as exec takes it: NAME=value.
using EnvironmentBlock = std::vector<std::string>;

/// One rank's place in a run on one machine.
struct RankPlace {
  int rank = 0;
  int world_size = 1;
  std::string run_dir;
  int store_fd = -1;                    ///< the number under which the rank inherits its socket to the store
  int page_fd = -1;                     ///< the number under which it inherits the board of pages; -1: there is none
  std::optional<int> terminal_columns;  ///< where the rank's output ends on a terminal
};

/// `inherited` with the variables that tell a rank its place. Stale ones of another launcher are replaced, and those
/// that would lead the rank to another launcher's rendezvous (MASTER_ADDR and so on) are removed.
EnvironmentBlock rank_environment(const EnvironmentBlock& inherited, const RankPlace& place);

/// The value of `name`, or `fallback`.
std::string find_variable(const EnvironmentBlock& environment, const std::string& name, const std::string& fallback);

/// What -n says: a whole number from 1 on, or "auto", the usable cores. Throws LaunchError (bad command line).
int parse_rank_count(const std::string& text, int usable_cores);

/// The path to execute for `name`: itself where it has a slash, else its first match in `search_path`. Throws
/// LaunchError (not started) that says what was looked for, and where.
std::string find_program(const std::string& name, const std::string& search_path);

/// Name of a new run's folder: runs/20240131-235959-train-4711.
std::string default_run_dir(const std::string& program, std::chrono::system_clock::time_point now, int pid);

/// The CPUs of one rank out of `cpus`; empty where a rank is not bound. A share is contiguous, all are equally large
/// and what is over stays free. Throws LaunchError (bad command line) when there are more ranks than CPUs to have one
/// each.
std::vector<int> rank_cpus(Binding bind, const std::vector<int>& cpus, int rank, int ranks);

/// A warning when there are more ranks than usable cores, else empty.
std::string crowding_warning(int ranks, int usable_cores, int threads_per_rank);

}  // namespace lockstep
