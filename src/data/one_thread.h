#pragma once

namespace lockstep {

/// Makes ATen's operators on this thread use only this thread from now on. Calling it again is cheap.
///
/// at::set_num_threads does not work here: every thread that starts to compute later adopts its number.
/// c10::ParallelGuard has no effect on operators. So this sets OpenMP's and MKL's numbers, which are per thread; it
/// does nothing for a LibTorch that was built without them.
void compute_on_this_thread_only();

}  // namespace lockstep
