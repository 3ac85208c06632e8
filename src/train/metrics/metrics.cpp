// Every number of every metric travels as a double in one all-reduce: sums of counts are exact there up to 2^53, and
// two collectives, one for integers, would cost twice the time. In front lie as many numbers as there are ranks: rank
// r's is 1 if it has failed.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <lockstep/error.h>
#include <lockstep/evaluate.h>
#include <lockstep/metrics.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>

namespace lockstep {

// ---- Metric ----

void Metric::reset() {
  std::fill(numbers_.begin(), numbers_.end(), 0.0);
  on_device_.reset();
  reduced_ = false;
}

double* Metric::begin_update() {
  if (reduced_) reset();
  return numbers_.data();
}

void Metric::add(const at::Tensor& numbers) {
  begin_update();
  on_device_ = on_device_.defined() ? on_device_ + numbers : numbers;
}

const std::vector<double>& Metric::numbers() const {
  if (on_device_.defined()) {
    const at::Tensor here = on_device_.cpu().contiguous();
    const double* counted = here.const_data_ptr<double>();
    for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i] += counted[i];
    on_device_.reset();
  }
  return numbers_;
}

void Metric::set_reduced(const double* numbers) {
  std::copy_n(numbers, numbers_.size(), numbers_.begin());
  on_device_.reset();
  reduced_ = true;
}

// ---- Mean: sum of value * weight, sum of weights ----

void Mean::update(double value, int64_t weight) {
  TORCH_CHECK(weight >= 0, "Mean: the weight is ", weight, ", expected none below 0");
  double* numbers = begin_update();
  // A value that stands for nothing, such as the NaN of an empty batch, must not spoil the sum.
  if (weight == 0) return;
  numbers[0] += value * static_cast<double>(weight);
  numbers[1] += static_cast<double>(weight);
}

void Mean::update(const at::Tensor& value, int64_t weight) {
  TORCH_CHECK(weight >= 0, "Mean: the weight is ", weight, ", expected none below 0");
  const at::NoGradGuard no_grad;
  if (value.numel() == 0 || weight == 0) {
    begin_update();
    return;
  }
  if (value.device().is_cpu())
    return value.numel() == 1 ? update(value.item<double>(), weight)
                              : update(value.mean(at::kDouble).item<double>(), weight * value.numel());
  const double weights = static_cast<double>(weight * value.numel());
  const at::Tensor sum = value.detach().sum(at::kDouble) * static_cast<double>(weight);
  add(at::stack({sum, at::full({}, weights, sum.options())}));
}

double Mean::value() const { return numbers()[0] / numbers()[1]; }
int64_t Mean::count() const { return std::llround(numbers()[1]); }
void Mean::append_values(const std::string& name, MetricValues& values) const { values.emplace_back(name, value()); }

double Perplexity::value() const { return std::exp(Mean::value()); }
void Perplexity::append_values(const std::string& name, MetricValues& values) const {
  values.emplace_back(name, value());
}

// ---- Metrics ----

void Metrics::insert(const std::string& name, std::unique_ptr<Metric> metric) {
  for (const auto& [other, there] : metrics_) TORCH_CHECK(other != name, "Metrics: `", name, "` is there already");
  metrics_.emplace_back(name, std::move(metric));
}

void Metrics::reduce(const Group& group, bool failed) {
  std::vector<double> numbers(static_cast<size_t>(group.world_size()));
  numbers[static_cast<size_t>(group.rank())] = failed ? 1 : 0;
  for (const auto& [name, metric] : metrics_) {
    metric->begin_update();  // a rank without a sample since the last time has nothing to give
    numbers.insert(numbers.end(), metric->numbers().begin(), metric->numbers().end());
  }
  const at::Tensor sum =
      at::from_blob(numbers.data(), {static_cast<int64_t>(numbers.size())}, at::TensorOptions(at::kDouble));
  group.all_reduce(sum);
  if (failed) return;
  for (int rank = 0; rank < group.world_size(); ++rank)
    if (numbers[static_cast<size_t>(rank)] != 0)
      throw Error("rank " + std::to_string(group.rank()) + ": the metrics cannot be reduced, because rank " +
                  std::to_string(rank) + " failed before; its own message says why");
  const double* next = numbers.data() + group.world_size();
  for (const auto& [name, metric] : metrics_) {
    metric->set_reduced(next);
    next += metric->numbers_.size();
  }
}

void Metrics::reduce(const Group& group) { reduce(group, false); }

void Metrics::reset() {
  for (const auto& [name, metric] : metrics_) metric->reset();
}

MetricValues Metrics::values() const {
  MetricValues values;
  for (const auto& [name, metric] : metrics_) metric->append_values(name, values);
  return values;
}

std::string Metrics::to_string() const {
  std::string text;
  for (const auto& [name, value] : values()) {
    std::array<char, 32> number;
    std::snprintf(number.data(), number.size(), "%.4f", value);
    text += (text.empty() ? "" : "  ") + name + " " + number.data();
  }
  return text;
}

// ---- evaluation ----

EvaluationMode::EvaluationMode(torch::nn::Module& module) : module_(module) {
  was_training_.push_back(module.is_training());
  for (const auto& part : module.modules(/*include_self=*/false)) was_training_.push_back(part->is_training());
  module.eval();
}

EvaluationMode::~EvaluationMode() {
  // A module sets its parts too, so each part is set after what it lies in.
  size_t next = 0;
  module_.train(was_training_[next++]);
  for (const auto& part : module_.modules(/*include_self=*/false))
    if (next < was_training_.size()) part->train(was_training_[next++]);
}

void detail::check_evaluation(const LoaderBase& loader, const Group& group) {
  TORCH_CHECK(loader.options().exactly_once,
              "evaluate: this loader repeats samples where ranks are short of one; make it with exactly_once = true");
  TORCH_CHECK(loader.world_size() == group.world_size() && loader.rank() == group.rank(),
              "evaluate: the loader is rank ", loader.rank(), " of ", loader.world_size(), ", the group's is ",
              group.rank(), " of ", group.world_size());
}

}  // namespace lockstep
