#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "collectives/shm/kernels/element.h"
#include "collectives/shm/kernels/reduce.h"

namespace lockstep::optim {

/// The formulas of torch::optim in LibTorch 2.x, in their order of operations.
enum class Algorithm : uint8_t { kSgd, kSgdMomentum, kSgdNesterov, kAdam, kAdamAmsgrad };
inline constexpr int kAlgorithms = 5;

/// The number of state arrays of an algorithm: momentum_buffer; exp_avg, exp_avg_sq, max_exp_avg_sq.
constexpr int state_arrays(Algorithm algorithm) {
  constexpr int kArrays[kAlgorithms] = {0, 1, 1, 2, 3};
  return kArrays[static_cast<int>(algorithm)];
}

/// Constants of one step, common to all elements of one parameter. Computed in double; the kernel rounds each to its
/// own type, as LibTorch's operators do with their scalars.
struct StepConstants {
  double weight_decay = 0;  ///< added to the gradient, times the parameter (SGD, Adam)
  double decay = 1;         ///< the parameter is multiplied by this first (AdamW: 1 - lr * weight_decay)
  double step_size = 0;     ///< SGD: lr. Adam: lr / (1 - beta1^t)
  double momentum = 0;      ///< SGD: momentum. Adam: beta1
  double dampened = 1;      ///< SGD: 1 - dampening, 1 in the first step. Adam: 1 - beta1
  double beta2 = 0;
  double one_minus_beta2 = 1;
  double root = 1;  ///< sqrt(1 - beta2^t)
  double eps = 0;

  bool operator==(const StepConstants&) const = default;
};

/// One step of a run of elements of one parameter.
struct StepTask {
  const void* gradient;
  void* parameter;  ///< in the gradient's type
  void* master;     ///< float; unused without a master
  void* state[3];   ///< see state_arrays(): float if there is a master, else in the gradient's type
  size_t count;
  const StepConstants* constants;
};
using StepFunction = void (*)(const StepTask&);

/// The kernel for float, double, float16 or bfloat16; null for other types. No multiplication is fused with an
/// addition, and square roots and divisions are exact: all instruction sets give the same bits.
///
/// float16 and bfloat16 are computed in float and rounded when stored. `with_master` (for these two): StepTask::master
/// keeps the precision that the parameter lacks. If the master does not round to the parameter, other code has written
/// the parameter, and the parameter counts; so the master may start with any value.
StepFunction find_step(shm::DataType type, Algorithm algorithm, bool with_master = false,
                       shm::InstructionSet set = shm::best_instruction_set());

// One translation unit per instruction set, for the reason given in collectives/shm/kernels/reduce.h.
StepFunction find_step_baseline(shm::DataType type, Algorithm algorithm, bool with_master);
StepFunction find_step_avx2(shm::DataType type, Algorithm algorithm, bool with_master);
StepFunction find_step_avx512(shm::DataType type, Algorithm algorithm, bool with_master);
StepFunction find_step_neon(shm::DataType type, Algorithm algorithm, bool with_master);

}  // namespace lockstep::optim
