#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

/// A part of a machine whose CPUs reach its own memory faster than other memory.
struct NumaNode {
  int number = 0;
  std::vector<int> cpus;  ///< ascending
};

/// The machine's nodes with CPUs, ascending; if the kernel reports no nodes, one with all CPUs of
/// `root`/sys/devices/system/cpu/online. `root` is for tests.
std::vector<NumaNode> numa_nodes(const std::string& root = "");

/// The numbers in a list such as the kernel's "0-3,8,10-11", ascending, up to the first malformed or absurd one.
std::vector<int> parse_cpu_list(std::string_view text);

/// Makes this process, also after exec, take memory from `node` first, and from others when that is full. Returns false
/// if the kernel refuses (containers often do): memory then comes from the node of the CPU that first touches it. Safe
/// between fork and exec.
bool prefer_memory_of(int node);

}  // namespace lockstep
