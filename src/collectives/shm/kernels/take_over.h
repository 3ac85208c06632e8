#pragma once

#include <cstddef>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::shm {

/// kernel(reduction) whose outputs are also inputs. All outputs except `own` lie in other ranks' memory.
///
/// A line that another processor has written is fetched for writing at once, not for reading first: the same line then
/// brings the input and takes the sum back. Requesting write access later takes several times as long (64 KiB on 2
/// cores, AMD EPYC: 10 us; fetching for writing takes 2.5 us).
void reduce_and_take_over(ReduceFunction kernel, const Reduction& reduction, int own, size_t element_bytes);

}  // namespace lockstep::shm
