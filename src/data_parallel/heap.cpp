#include "data_parallel/heap.h"

#include <dlfcn.h>
#include <malloc.h>

#include <climits>
#include <string>

#include "base/environment.h"

namespace lockstep {
namespace {

// The largest value to which glibc adapts this threshold by itself, and the largest that it accepts. Setting one of the
// two thresholds ends that adaptation, so both are set.
constexpr int kMmapThreshold = 32 << 20;

/// The base address of the shared object that provides this function in the process, or null.
const void* origin_of(const char* function) {
  void* const address = ::dlsym(RTLD_DEFAULT, function);
  Dl_info info{};
  return address != nullptr && ::dladdr(address, &info) != 0 ? info.dli_fbase : nullptr;
}

/// Does not rely on mallopt(): if jemalloc replaces malloc, mallopt() is still glibc's and reports success.
bool malloc_is_glibcs() {
  const void* const malloc = origin_of("malloc");
  return malloc != nullptr && malloc == origin_of("gnu_get_libc_version");
}

}  // namespace

bool keep_freed_memory() {
  const Environment environment = Environment::from_process();
  if (environment.malloc_trim_threshold_ || environment.malloc_mmap_threshold_ ||
      environment.glibc_tunables.value_or("").find("glibc.malloc.") != std::string::npos)
    return false;
  return malloc_is_glibcs() && mallopt(M_MMAP_THRESHOLD, kMmapThreshold) == 1 &&
         mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
}

void release_freed_memory() {
  mallopt(M_TRIM_THRESHOLD, 2 * kMmapThreshold);
  malloc_trim(0);
}

}  // namespace lockstep
