#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A part of a machine whose CPUs reach its memory faster than other parts' memory.
struct NumaNode {
  int number = 0;
  std::vector<int> cpus;  ///< ascending
};

/// The machine's nodes that have CPUs, ascending; one with all CPUs of `root`/sys/devices/system/cpu/online where the
/// kernel tells of no nodes. `root` is for tests.
std::vector<NumaNode> numa_nodes(const std::string& root = "");

/// The numbers in the kernel's "0-3,8,10-11", ascending; up to the first that is malformed, or absurd.
std::vector<int> parse_cpu_list(std::string_view text);

/// Makes this process, and what it executes, take memory from `node` first, from others where that is full. False
/// where the kernel refuses (containers often do): memory then comes from the node of the CPU that first touches it.
/// Safe between fork and exec.
bool prefer_memory_of(int node);

}  // namespace lockstep
