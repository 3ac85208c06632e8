#include "data/prefetcher.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

namespace lockstep {
namespace {

using SetThreads = void (*)(int);

/// Looks up the OpenMP and MKL that LibTorch has loaded, because linking another copy would set that copy's threads.
SetThreads find(const char* name) { return reinterpret_cast<SetThreads>(::dlsym(RTLD_DEFAULT, name)); }

}  // namespace

void compute_on_this_thread_only() {
  static const SetThreads openmp = find("omp_set_num_threads");
  static const SetThreads mkl = find("MKL_Set_Num_Threads_Local");
  // A thread's first operator would set the numbers later; make that happen now, here and in LibTorch, which may keep
  // two records.
  at::internal::lazy_init_num_threads();
  at::get_num_threads();
  if (openmp != nullptr) openmp(1);
  if (mkl != nullptr) mkl(1);
}

}  // namespace lockstep
