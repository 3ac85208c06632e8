#pragma once

#include <cstdint>

#include <lockstep/trainer.h>

namespace lockstep {

/// Throws the same Error on all ranks if they train by different options; it names the first that differs, and who has
/// what. What only rank 0 uses may differ. `schedule`: of the learning rate, for `steps` steps; null: there is none.
/// `evaluates`: evaluate_on() was called. All ranks call it.
void check_agreement(const Group& group, const TrainerOptions& options, const Schedule* schedule, int64_t steps,
                     bool evaluates);

/// What a checkpoint keeps of how batches make steps: how many make one, and on how many ranks.
c10::IValue state_of_accumulation(int accumulate, int world_size);
/// Throws Error if that many ranks took another number of batches: the steps of the checkpoint would be others.
void check_accumulation(const c10::IValue& saved, int accumulate, int world_size);

}  // namespace lockstep
