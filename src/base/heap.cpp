#include "base/heap.h"

#include <malloc.h>

#include <climits>
#include <string>

#include "base/environment.h"

namespace lockstep {

bool keep_freed_memory() {
  const Environment environment = Environment::from_process();
  if (environment.malloc_trim_threshold_ || environment.malloc_mmap_threshold_ ||
      environment.glibc_tunables.value_or("").find("glibc.malloc.") != std::string::npos)
    return false;
  // Where glibc's own adaptation of this threshold ends, and the most that it accepts. To set one of the two ends that
  // adaptation, so both are set.
  constexpr int kMmapThreshold = 32 << 20;
  return mallopt(M_MMAP_THRESHOLD, kMmapThreshold) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}

}  // namespace lockstep
