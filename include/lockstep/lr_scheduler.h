#pragma once

#include <cstdint>
#include <memory>
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
///
/// An optimizer has one at a time, because each would overwrite the rates of the other: sequential_lr() and warm_up()
/// make one schedule of several. TORCH_CHECK fails when a second one is made of rates that another has set, and in
/// step() of one that was made before another that still exists.
class LRScheduler {
 public:
  /// Sets the rates of the first step. `optimizer` must outlive this object. TORCH_CHECK fails for a schedule that
  /// varies the momentum of an optimizer without any, such as one_cycle_lr() over SGD(0.1).
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  /// One schedule per group.
  LRScheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  /// Call it after each step of the optimizer: sets the rates of the next one. A group that was added since starts from
  /// the rate it has (TORCH_CHECK fails if there is one schedule per group). TORCH_CHECK fails for a rate that is not
  /// finite or below 0, before anything is changed.
  void step();
  int64_t steps() const { return steps_; }
  /// The rate of each group for the next step.
  std::vector<double> get_last_lr() const;

  /// {"last_epoch", "_step_count", "base_lrs", "_last_lr"}: the entries that all of Python's schedulers have. The
  /// schedule itself is not saved.
  c10::IValue state_dict() const;
  /// The reverse, for files from either language; also sets the rates. Throws Error, before anything is changed, if the
  /// number of groups differs, or a base rate is not finite or below 0.
  void load_state_dict(const c10::IValue& state);

 private:
  struct Claim;
  /// The values of the schedules at a step.
  struct Values;
  Values values_at(int64_t steps, std::vector<double> base_lrs) const;
  void apply(Values values);

  torch::optim::Optimizer* optimizer_;
  std::vector<Schedule> schedules_;  ///< one, or one per group
  std::vector<double> base_lrs_;
  int64_t steps_ = 0;
  std::vector<bool> momentum_varied_;  ///< by group: the schedule has set its momentum
  std::shared_ptr<Claim> claim_;       ///< to the optimizer; copies share it; null: moved from
};

}  // namespace lockstep
