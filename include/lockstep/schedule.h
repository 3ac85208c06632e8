#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

namespace lockstep {

/// The learning rate as a function of the optimizer steps made so far, for an LRScheduler. To write your own:
///
///     lockstep::Schedule inverse_root{.rate = [](double base, int64_t step) { return base / std::sqrt(step + 1.0); }};
///
/// The functions below give PyTorch's schedules under PyTorch's names, in closed form: the rate of a step does not
/// depend on the steps before it. TORCH_CHECK fails for arguments out of range.
struct Schedule {
  /// The rate after `step` optimizer steps, for a group whose base rate is `base`.
  std::function<double(double base, int64_t step)> rate;
  /// Momentum (SGD, RMSprop) or the first beta (Adam, AdamW) after `step` steps. Null or nullopt: unchanged.
  std::function<std::optional<double>(int64_t step)> momentum = nullptr;
};

/// base * factor for the first `total_iters` steps, then base.
Schedule constant_lr(double factor = 1.0 / 3, int64_t total_iters = 5);
/// From base * start_factor to base * end_factor in a straight line of `total_iters` steps, then constant.
Schedule linear_lr(double start_factor = 1.0 / 3, double end_factor = 1, int64_t total_iters = 5);
/// base * gamma^n after n * step_size steps.
Schedule step_lr(int64_t step_size, double gamma = 0.1);
/// base * gamma^n once n of the milestones are reached. Milestones must ascend.
Schedule multi_step_lr(std::vector<int64_t> milestones, double gamma = 0.1);
/// base * gamma^step.
Schedule exponential_lr(double gamma);
/// base * (1 - step / total_iters)^power, then 0.
Schedule polynomial_lr(int64_t total_iters = 5, double power = 1);
/// Along half a cosine from base to `eta_min` in `t_max` steps, and back in the next `t_max`, as in PyTorch.
Schedule cosine_annealing_lr(int64_t t_max, double eta_min = 0);
/// As above, but after `t_0` steps it restarts at base; each period is t_mult times as long as the previous one.
Schedule cosine_annealing_warm_restarts(int64_t t_0, int64_t t_mult = 1, double eta_min = 0);

enum class AnnealStrategy { kCos, kLinear };

/// PyTorch's options, except that max_lr may be omitted.
struct OneCycleOptions {
  int64_t total_steps;
  std::optional<double> max_lr{};  ///< unset: each group's own rate
  double pct_start = 0.3;          ///< the share of steps in which the rate rises
  AnnealStrategy anneal_strategy = AnnealStrategy::kCos;
  bool cycle_momentum = true;  ///< momentum falls while the rate rises, and vice versa
  double base_momentum = 0.85;
  double max_momentum = 0.95;
  double div_factor = 25;         ///< the first rate is max_lr / div_factor
  double final_div_factor = 1e4;  ///< the last one is the first / final_div_factor
  bool three_phase = false;
};
/// The 1cycle policy (Smith and Topin, Super-Convergence, arXiv:1708.07120). TORCH_CHECK fails for steps beyond
/// total_steps.
Schedule one_cycle_lr(const OneCycleOptions& options);

/// The first schedule for milestones[0] steps, then the second, which counts its steps from there, and so on.
/// Milestones must ascend; there is one fewer than schedules.
Schedule sequential_lr(std::vector<Schedule> schedules, std::vector<int64_t> milestones);
/// `steps` steps in a straight line from base * start_factor to base, then `then`: a sequential_lr of linear_lr and
/// `then`.
Schedule warm_up(int64_t steps, Schedule then, double start_factor = 1e-3);

}  // namespace lockstep
