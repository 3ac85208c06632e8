#include <dlfcn.h>

#include <cstdio>

#include "data_parallel/heap.h"

// Prints what keep_freed_memory() answers in a process whose malloc a test has replaced, and whether it has been.

int main() {
  const bool keeps = lockstep::keep_freed_memory();
  const bool replaced = ::dlsym(RTLD_DEFAULT, "mallctl") != nullptr || ::dlsym(RTLD_DEFAULT, "other_malloc") != nullptr;
  std::printf("%s %s", replaced ? "another" : "glibc", keeps ? "keeps" : "as it was");
}
