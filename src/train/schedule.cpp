#include <lockstep/schedule.h>

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

#include <c10/util/Exception.h>

namespace lockstep {
namespace {

double ratio(int64_t part, int64_t whole) { return static_cast<double>(part) / static_cast<double>(whole); }

/// From `start` to `end` along half a cosine; `part` is the share of the way, from 0 to 1.
double along_cosine(double start, double end, double part) {
  return end + (start - end) * (1 + std::cos(std::numbers::pi * part)) / 2;
}

void check_ascending(const std::vector<int64_t>& milestones) {
  TORCH_CHECK(std::is_sorted(milestones.begin(), milestones.end()) && (milestones.empty() || milestones.front() >= 0),
              "milestones must be ascending numbers of steps");
}

size_t reached(const std::vector<int64_t>& milestones, int64_t step) {
  return static_cast<size_t>(std::upper_bound(milestones.begin(), milestones.end(), step) - milestones.begin());
}

// ---- the 1cycle policy ----

enum class Level { kInitial, kMaximum, kMinimum };

struct Phase {
  double end_step;
  Level from, to;
  bool momentum_from_max, momentum_to_max;
};

std::vector<Phase> phases_of(const OneCycleOptions& options) {
  const auto total = static_cast<double>(options.total_steps);
  const double rise = options.pct_start * total;
  if (options.three_phase)
    return {{rise - 1, Level::kInitial, Level::kMaximum, true, false},
            {2 * rise - 2, Level::kMaximum, Level::kInitial, false, true},
            {total - 1, Level::kInitial, Level::kMinimum, true, true}};
  return {{rise - 1, Level::kInitial, Level::kMaximum, true, false},
          {total - 1, Level::kMaximum, Level::kMinimum, false, true}};
}

class OneCycle {
 public:
  explicit OneCycle(const OneCycleOptions& options) : options_(options), phases_(phases_of(options)) {}

  double rate(double base, int64_t step) const {
    const auto [phase, part] = place(step);
    const double maximum = options_.max_lr.value_or(base);
    const double rate = anneal(level(phase->from, maximum), level(phase->to, maximum), part);
    return step == options_.total_steps && rate < 0 ? 0 : rate;  // PyTorch's straight line goes on after the end
  }
  double momentum(int64_t step) const {
    const auto [phase, part] = place(step);
    return anneal(phase->momentum_from_max ? options_.max_momentum : options_.base_momentum,
                  phase->momentum_to_max ? options_.max_momentum : options_.base_momentum, part);
  }

 private:
  /// The phase of a step, and the share of the phase that has passed.
  std::pair<const Phase*, double> place(int64_t at) const {
    TORCH_CHECK(at <= options_.total_steps, "one_cycle_lr: step ", at, " of a cycle of ", options_.total_steps,
                " steps; set total_steps to the number of steps that the optimizer makes");
    const auto step = static_cast<double>(at);
    double start = 0;
    size_t i = 0;
    for (; i + 1 < phases_.size() && step > phases_[i].end_step; ++i) start = phases_[i].end_step;
    const double length = phases_[i].end_step - start;
    return {&phases_[i], length == 0 ? 1 : (step - start) / length};
  }
  double level(Level level, double maximum) const {
    if (level == Level::kMaximum) return maximum;
    const double initial = maximum / options_.div_factor;
    return level == Level::kInitial ? initial : initial / options_.final_div_factor;
  }
  double anneal(double start, double end, double part) const {
    return options_.anneal_strategy == AnnealStrategy::kCos ? along_cosine(start, end, part)
                                                            : (end - start) * part + start;
  }

  OneCycleOptions options_;
  std::vector<Phase> phases_;
};

}  // namespace

Schedule constant_lr(double factor, int64_t total_iters) {
  TORCH_CHECK(factor >= 0 && factor <= 1, "constant_lr: factor must be from 0 to 1, not ", factor);
  return {.rate = [=](double base, int64_t step) { return step < total_iters ? base * factor : base; }};
}

Schedule linear_lr(double start_factor, double end_factor, int64_t total_iters) {
  TORCH_CHECK(start_factor > 0 && start_factor <= 1 && end_factor >= 0 && end_factor <= 1 && total_iters > 0,
              "linear_lr(", start_factor, ", ", end_factor, ", ", total_iters,
              "): start_factor must be above 0 and at most 1, end_factor from 0 to 1, total_iters above 0");
  return {.rate = [=](double base, int64_t step) {
    return base * (start_factor + (end_factor - start_factor) * ratio(std::min(total_iters, step), total_iters));
  }};
}

Schedule step_lr(int64_t step_size, double gamma) {
  TORCH_CHECK(step_size > 0, "step_lr: step_size must be above 0, not ", step_size);
  return {
      .rate = [=](double base, int64_t step) { return base * std::pow(gamma, static_cast<double>(step / step_size)); }};
}

Schedule multi_step_lr(std::vector<int64_t> milestones, double gamma) {
  check_ascending(milestones);
  return {.rate = [=, milestones = std::move(milestones)](double base, int64_t step) {
    return base * std::pow(gamma, static_cast<double>(reached(milestones, step)));
  }};
}

Schedule exponential_lr(double gamma) {
  return {.rate = [=](double base, int64_t step) { return base * std::pow(gamma, static_cast<double>(step)); }};
}

Schedule polynomial_lr(int64_t total_iters, double power) {
  TORCH_CHECK(total_iters > 0, "polynomial_lr: total_iters must be above 0, not ", total_iters);
  return {.rate = [=](double base, int64_t step) {
    return base * std::pow(1 - ratio(std::min(total_iters, step), total_iters), power);
  }};
}

Schedule cosine_annealing_lr(int64_t t_max, double eta_min) {
  TORCH_CHECK(t_max > 0, "cosine_annealing_lr: t_max must be above 0, not ", t_max);
  return {.rate = [=](double base, int64_t step) { return along_cosine(base, eta_min, ratio(step, t_max)); }};
}

Schedule cosine_annealing_warm_restarts(int64_t t_0, int64_t t_mult, double eta_min) {
  TORCH_CHECK(t_0 > 0 && t_mult >= 1, "cosine_annealing_warm_restarts(", t_0, ", ", t_mult,
              "): t_0 must be above 0 and t_mult at least 1");
  return {.rate = [=](double base, int64_t step) {
    int64_t length = t_0, since = step;
    if (t_mult == 1) since %= t_0;
    while (since >= length) {
      since -= length;
      length *= t_mult;
    }
    return along_cosine(base, eta_min, ratio(since, length));
  }};
}

Schedule one_cycle_lr(const OneCycleOptions& options) {
  TORCH_CHECK(options.total_steps > 0, "one_cycle_lr: total_steps must be above 0, not ", options.total_steps);
  TORCH_CHECK(options.pct_start >= 0 && options.pct_start <= 1, "one_cycle_lr: pct_start is a share from 0 to 1, not ",
              options.pct_start);
  const OneCycle cycle(options);
  Schedule schedule{.rate = [cycle](double base, int64_t step) { return cycle.rate(base, step); }};
  if (options.cycle_momentum) schedule.momentum = [cycle](int64_t step) { return cycle.momentum(step); };
  return schedule;
}

Schedule sequential_lr(std::vector<Schedule> schedules, std::vector<int64_t> milestones) {
  TORCH_CHECK(!schedules.empty() && milestones.size() + 1 == schedules.size(), "sequential_lr: ", schedules.size(),
              " schedules need one milestone fewer, not ", milestones.size());
  for (const Schedule& one : schedules) TORCH_CHECK(one.rate, "sequential_lr: a schedule has no rate function");
  check_ascending(milestones);
  const auto local = [milestones](int64_t step) {
    const size_t part = reached(milestones, step);
    return std::pair(part, part == 0 ? step : step - milestones[part - 1]);
  };
  const bool varies_momentum =
      std::any_of(schedules.begin(), schedules.end(), [](const Schedule& one) { return one.momentum != nullptr; });
  Schedule whole{.rate = [=](double base, int64_t step) {
    const auto [part, since] = local(step);
    return schedules[part].rate(base, since);
  }};
  if (varies_momentum)
    whole.momentum = [=](int64_t step) -> std::optional<double> {
      const auto [part, since] = local(step);
      if (!schedules[part].momentum) return std::nullopt;
      return schedules[part].momentum(since);
    };
  return whole;
}

Schedule warm_up(int64_t steps, Schedule then, double start_factor) {
  return sequential_lr({linear_lr(start_factor, 1, steps), std::move(then)}, {steps});
}

}  // namespace lockstep
