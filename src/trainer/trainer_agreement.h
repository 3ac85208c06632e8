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

/// Throws the same Error on all ranks if their options, or their optimizers' options or parameters, differ; it names
/// the first difference and the ranks. Options used only by rank 0 may differ. If all agree and there is a schedule,
/// `use_schedule` receives it. If it or the options' schedule() throws on a rank, the Error on all ranks has the
/// reason.
/// REQUIRES: all ranks call it.
void check_agreement(const Group& group, const Agreement& agreement,
                     const std::function<void(const Schedule&)>& use_schedule);

/// Throws the same Error on all ranks if machines train by themselves on some of them only.
/// REQUIRES: all ranks call it, before the model is attached.
void check_same_machines(const Group& group, const TrainerOptions& options);

/// Throws the same Error on all ranks if the Replica that a Trainer was given does not reduce what the optimizer
/// trains: it is over other ranks than `group` (unless each machine trains by itself), or it is attached to another
/// module. REQUIRES: all ranks call it, before the first step.
void check_attached(const Group& group, const torch::nn::Module& module, const torch::optim::Optimizer& optimizer,
                    const Replica& model, const TrainerOptions& options);

/// A part of a checkpoint: the number of batches per step, and of ranks (or of virtual ranks, if there are any).
/// Loading throws Error if the same number of ranks took another number of batches, because the checkpoint's steps
/// would differ.
Checkpointer::Part accumulation_part(int accumulate, const Context& context);

/// TORCH_CHECK fails unless the loss is one number that can be differentiated.
void check_loss(const at::Tensor& loss);

/// The options, with folders of this machine's own where others run the same program by --islands.
TrainerOptions on_island(TrainerOptions options);

}  // namespace lockstep
