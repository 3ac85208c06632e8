#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/schedule.h>

namespace lockstep {

/// Adjusts the learning rate of an optimizer's parameter groups after each of its steps.
///
///     torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
///     lockstep::LRScheduler scheduler(optimizer, lockstep::warm_up(500, lockstep::cosine_annealing_lr(9500)));
///     ...
///     optimizer.step();
///     scheduler.step();                       // with a GradScaler: if (scaler.step(optimizer)) scheduler.step();
///     checkpointer.add("schedule", scheduler);
///
/// The schedule varies each group's own rate: the one it has when this object is made (so make it before you resume a
/// checkpoint). It does not communicate; ranks that make the same calls have the same rates.
class LRScheduler {
 public:
  /// Sets the rates of the first step. `optimizer` must outlive this object.
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  /// One schedule per group.
  LRScheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  /// Call it after each step of the optimizer: sets the rates of the next one. A group that was added since starts from
  /// the rate it has (TORCH_CHECK fails if there is one schedule per group).
  void step();
  int64_t steps() const { return steps_; }
  /// The rate of each group for the next step.
  std::vector<double> get_last_lr() const;

  /// {"last_epoch", "_step_count", "base_lrs", "_last_lr"}: the entries that all of Python's schedulers have. The
  /// schedule itself is not saved.
  c10::IValue state_dict() const;
  /// The reverse, for files from either language; also sets the rates. Throws Error, before anything is changed, if the
  /// number of groups differs.
  void load_state_dict(const c10::IValue& state);

 private:
  void apply();

  torch::optim::Optimizer* optimizer_;
  std::vector<Schedule> schedules_;  ///< one, or one per group
  std::vector<double> base_lrs_;
  int64_t steps_ = 0;
};

}  // namespace lockstep
