#pragma once

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace lockstep {

/// Calls body(begin, end) for parts of [0, count) on the threads of at::set_num_threads(), and returns when all are
/// done. A part has at least `grain` elements, unless count is less. Within another such loop it runs on the calling
/// thread alone. Rethrows exceptions of `body`.
///
/// at::parallel_for would not do: it is a template, and compiled without the OpenMP of LibTorch's own build, as this
/// library is, it is a plain loop.
void intra_op_for(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> body);

}  // namespace lockstep
