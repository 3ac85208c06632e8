#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/schedule.h>

namespace lockstep {

/// Sets the learning rate of an optimizer's parameter groups as the optimizer makes steps.
///
///     torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
///     lockstep::LRScheduler scheduler(optimizer, lockstep::warm_up(500, lockstep::cosine_annealing_lr(9500)));
///     ...
///     optimizer.step();
///     scheduler.step();                       // with a GradScaler: if (scaler.step(optimizer)) scheduler.step();
///     checkpointer.add("schedule", scheduler);
///
/// Each group keeps its own rate, the one it has when this object is made (before a checkpoint is resumed), and the
/// schedule varies that. Works on this rank alone; ranks that make the same calls have the same rates.
class LRScheduler {
 public:
  /// Sets the rates of the first step. `optimizer` must outlive this object.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  /// One schedule a group.
  LRScheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  /// After each step of the optimizer: sets the rates of the next one. A group that was added since takes part with
  /// the rate it has (not where there is one schedule a group: TORCH_CHECK fails).
  void step();
  int64_t steps() const { return steps_; }
  /// The rate of each group for the next step.
  std::vector<double> get_last_lr() const;

  /// {"last_epoch", "_step_count", "base_lrs", "_last_lr"}: of those entries of Python's schedulers that all of them
  /// have. The schedule itself is the program's.
  c10::IValue state_dict() const;
  /// The reverse, for what either language wrote: sets the rates too. Throws Error, before anything is changed, if it
  /// has another number of groups.
  void load_state_dict(const c10::IValue& state);

 private:
  void apply();

  torch::optim::Optimizer* optimizer_;
  std::vector<Schedule> schedules_;  ///< one, or one a group
  std::vector<double> base_lrs_;
  int64_t steps_ = 0;
};

}  // namespace lockstep
