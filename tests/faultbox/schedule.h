#pragma once

#include <cstdint>
#include <string>

namespace lockstep::faultbox {

struct Schedule {
  int steps = 200, kills = 3;
  int epoch = 50;  ///< steps
};

/// Kills random ranks of a training at the same random steps, under lockstep run (a checkpoint each step) and under
/// torchrun (`python`; PyTorch's DistributedDataParallel, a checkpoint each epoch), `count` times, and prints a table
/// of what was lost. Returns 0 if lockstep run has lost no more than a step a kill, and no bit.
int compare_schedules(const std::string& python, uint64_t seed, int count, const Schedule& schedule);

}  // namespace lockstep::faultbox
