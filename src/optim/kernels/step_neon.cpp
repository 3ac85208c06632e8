#include <arm_neon.h>

#include "optim/kernels/step_kernel.h"

namespace lockstep::optim {
namespace {

using shm::DataType;

#include "collectives/shm/kernels/vectors_neon.inc"

#include "optim/kernels/step_kernels.inc"

}  // namespace

StepFunction find_step_neon(shm::DataType type, Algorithm algorithm, bool with_master) {
  return find(type, algorithm, with_master);
}

}  // namespace lockstep::optim
