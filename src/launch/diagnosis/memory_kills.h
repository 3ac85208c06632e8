#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// How often the kernel has killed for want of memory, where this process can see it. It does not say whom: that a
/// rank was killed for memory is a conclusion from a SIGKILL that nobody here has sent, and a count that has grown.
struct MemoryKills {
  uint64_t count = 0;
  std::string counted_in;               ///< "the cgroup /a/b" or "the whole machine"; empty: not to be seen
  std::optional<uint64_t> limit_bytes;  ///< the tightest of the cgroups'
};

/// Of the cgroup of this process and those around it, else of the whole machine. `root` stands in for / in tests.
MemoryKills count_memory_kills(const std::string& root = "");

}  // namespace lockstep
