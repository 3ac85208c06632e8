#pragma once

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace lockstep {

/// body(begin, end) for parts of [0, count), on the threads of at::set_num_threads(), then returns. A part has at least
/// `grain` elements, unless count is less. In a thread of another such loop it runs all by itself. An exception of
/// `body` is rethrown here.
///
/// at::parallel_for is a template: compiled without the OpenMP of LibTorch's own build, as this library is, it is a
/// plain loop.
void intra_op_for(int64_t count, int64_t grain, c10::function_ref<void(int64_t begin, int64_t end)> body);

}  // namespace lockstep
