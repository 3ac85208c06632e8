#include <dlfcn.h>

#include <cstdio>

#include "data_parallel/heap.h"

// Prints whether a test has replaced malloc in this process, and what keep_freed_memory() returns.

int main() {
  const bool keeps = lockstep::keep_freed_memory();
  const bool replaced = ::dlsym(RTLD_DEFAULT, "mallctl") != nullptr || ::dlsym(RTLD_DEFAULT, "other_malloc") != nullptr;
  std::printf("%s %s", replaced ? "another" : "glibc", keeps ? "keeps" : "as it was");
}
