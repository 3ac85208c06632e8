#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// How often the kernel has killed a process for lack of memory, as far as this process can see. The kernel does not
/// say which process: that a rank was killed for memory is inferred from a SIGKILL that nobody here sent and a count
/// that has grown.
struct MemoryKills {
  uint64_t count = 0;
  std::string counted_in;               ///< "the cgroup /a/b" or "the whole machine"; empty: not visible
  std::optional<uint64_t> limit_bytes;  ///< the tightest of the cgroups'
};

/// The count of this process's cgroup or an enclosing one, else of the whole machine. `root` replaces / in tests.
MemoryKills count_memory_kills(const std::string& root = "");

}  // namespace lockstep
