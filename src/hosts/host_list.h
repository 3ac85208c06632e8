#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

/// A machine of a run and its number of ranks.
struct Host {
  std::string name;
  int slots = 1;
  bool operator==(const Host&) const = default;
};

/// "node1:4,node2:4"; without a number a machine has `slots` ranks. A machine may be named once. Throws LaunchError
/// (bad command line).
std::vector<Host> parse_hosts(const std::string& text, int slots);

/// Reads mpirun's format: a line `node1 slots=4` per machine. Text after a # is ignored, and so is max_slots. Lines
/// without slots= may repeat a machine, which then has `slots` ranks for each, as in $PBS_NODEFILE. Throws LaunchError
/// (bad command line), naming the line.
std::vector<Host> read_hostfile(const std::string& path, int slots);

/// The names in a list of Slurm's form: "node[01-03,07],login1" has five. Throws LaunchError (bad command line).
std::vector<std::string> parse_slurm_nodes(const std::string& text);

}  // namespace lockstep::hosts
