#pragma once

#include <cstdint>

#include <lockstep/trainer.h>

namespace lockstep {

/// Throws the same Error on all ranks if they train by different options, or step by optimizers with different ones; it
/// names the first that differs, and who has what. What only rank 0 uses may differ. `schedule`: of the learning rate, for `steps` steps; null: there is none.
/// `evaluates`: evaluate_on() was called. All ranks call it.
void check_agreement(const Group& group, const TrainerOptions& options, const torch::optim::Optimizer& optimizer,
                     const Schedule* schedule, int64_t steps, bool evaluates);

/// For a checkpoint: how many batches make a step, and on how many ranks. Loading it throws Error if that many ranks took
/// another number of batches: the steps of the checkpoint would be others.
Checkpointer::Part accumulation_part(int accumulate, int world_size);

/// TORCH_CHECK fails unless it is one number that can be differentiated.
void check_loss(const at::Tensor& loss);

}  // namespace lockstep
