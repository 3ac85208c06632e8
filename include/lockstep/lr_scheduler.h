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
/// The schedule varies each group's base rate, which is its rate when this object is made: make it before resuming a
/// checkpoint. It does not communicate; ranks that make the same calls have the same rates.
///
/// An optimizer has one scheduler at a time, because two would overwrite each other's rates: sequential_lr() and
/// warm_up() combine schedules. TORCH_CHECK fails when a second one is made from rates that another has set, and in
/// step() of one while a newer one exists.
class LRScheduler {
 public:
  /// Sets the rates of the first step. `optimizer` must outlive this object. TORCH_CHECK fails for a schedule that
  /// varies momentum if the optimizer has none, such as one_cycle_lr() over SGD(0.1).
  LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule);
  /// One schedule per group.
  LRScheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules);

  /// Call it after each step of the optimizer. Sets the rates of the next step. A group that was added since starts
  /// from its present rate (TORCH_CHECK fails if there is one schedule per group). TORCH_CHECK fails, before anything
  /// is changed, for a rate that is not finite or below 0.
  void step();
  int64_t steps() const { return steps_; }
  /// The rate of each group for the next step.
  std::vector<double> get_last_lr() const;
  /// The rate of each group after the next step(), which it changes nothing for. TORCH_CHECK fails as in step(): so a
  /// schedule that has ended is known before the optimizer steps.
  std::vector<double> next_lr() const;

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
  std::vector<bool> momentum_varied_;  ///< by group: whether the schedule has set its momentum
  std::shared_ptr<Claim> claim_;       ///< on the optimizer, shared by copies; null: moved from
};

}  // namespace lockstep
