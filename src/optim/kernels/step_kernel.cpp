#include "optim/kernels/step_kernel.h"

namespace lockstep::optim {

StepFunction find_step(shm::DataType type, Algorithm algorithm, bool with_master,
                       [[maybe_unused]] shm::InstructionSet set) {
#ifdef LOCKSTEP_X86_KERNELS
  if (set == shm::InstructionSet::kAvx512) return find_step_avx512(type, algorithm, with_master);
  if (set == shm::InstructionSet::kAvx2) return find_step_avx2(type, algorithm, with_master);
#endif
#ifdef LOCKSTEP_NEON_KERNELS
  if (set == shm::InstructionSet::kNeon) return find_step_neon(type, algorithm, with_master);
#endif
  return find_step_baseline(type, algorithm, with_master);
}

}  // namespace lockstep::optim
