#pragma once

#include <type_traits>

#include "optim/kernels/step_kernel.h"

// One translation unit per instruction set, for the reason given in collectives/shm/kernels/reduce_sets.h.
namespace lockstep::optim {

StepFunction find_step_baseline(shm::DataType type, Algorithm algorithm, bool with_master);
StepFunction find_step_avx2(shm::DataType type, Algorithm algorithm, bool with_master);
StepFunction find_step_avx512(shm::DataType type, Algorithm algorithm, bool with_master);
StepFunction find_step_neon(shm::DataType type, Algorithm algorithm, bool with_master);

}  // namespace lockstep::optim
