#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <lockstep/trainer.h>

namespace lockstep {

/// Values on which the ranks must agree.
struct Agreement {
  const TrainerOptions& options;
  const torch::nn::Module& module;
  const torch::optim::Optimizer& optimizer;
  int64_t steps;   ///< of the whole training, for the options' schedule
  bool evaluates;  ///< evaluate_on() was called
};

/// Throws the same Error on all ranks if they train by different options, or step by optimizers with different ones or
/// other parameters; it names the first that differs, and who has what. What only rank 0 uses may differ. If they agree
/// and there is a schedule, `use_schedule` takes it. Where that or the options' schedule() throws on a rank, the Error
/// on all says why. All ranks call it.
void check_agreement(const Group& group, const Agreement& agreement,
                     const std::function<void(const Schedule&)>& use_schedule);

/// For a checkpoint: how many batches make a step, and on how many ranks (virtual ones, where there are some). Loading
/// it throws Error if that many ranks took another number of batches: the steps of the checkpoint would be others.
Checkpointer::Part accumulation_part(int accumulate, const Context& context);

/// TORCH_CHECK fails unless it is one number that can be differentiated.
void check_loss(const at::Tensor& loss);

}  // namespace lockstep
