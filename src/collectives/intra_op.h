#pragma once

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace lockstep {

/// Calls body(begin, end) for parts of [0, count) on the threads of at::set_num_threads(), and returns when all are
/// done. A part has at least `grain` elements, unless count is less. Within another such loop it runs on the calling
/// thread alone. Rethrows exceptions of `body`.
///
/// at::parallel_for does not work here: it is a template, which becomes a plain loop when compiled without OpenMP, as
/// this library is.
void intra_op_for(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> body);

}  // namespace lockstep
