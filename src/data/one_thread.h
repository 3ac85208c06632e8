#pragma once

namespace lockstep {

/// From now on, ATen's operators on this thread use this thread alone. Cheap when called again.
///
/// at::set_num_threads will not do: every thread that starts to compute later takes its number over. c10::ParallelGuard
/// has no effect on operators. So this asks OpenMP and MKL, which count per thread, and does nothing for a LibTorch
/// that was built without them.
void compute_on_this_thread_only();

}  // namespace lockstep
