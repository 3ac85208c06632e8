// Every number of every metric is sent as a double in one all-reduce: sums of counts are exact up to 2^53, and two
// collectives, one for integers, would take twice the time. The message starts with one number per rank: rank r's is a
// hash of the things that it counts, or says that it has failed. The message has the same size whatever is counted, so
// ranks that count different things learn of it from this message. Numbers that do not fit follow in a second message,
// once it is known that all ranks have equally many.

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <lockstep/error.h>
#include <lockstep/evaluate.h>
#include <lockstep/metrics.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <typeinfo>
#include <utility>

#include <c10/util/Type.h>

#include "base/hash.h"
#include "base/text.h"
#include "base/virtual_ranks.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"
#include "train/same_data.h"

namespace lockstep {
namespace {

constexpr size_t kNumbersInFirstMessage = 64;
constexpr double kFailed = -1;

at::Tensor tensor_of(double* numbers, size_t count) {
  return at::from_blob(numbers, {static_cast<int64_t>(count)}, at::TensorOptions(at::kDouble));
}

/// A whole number above 0, small enough for a double, that differs if the texts do.
double number_of(const std::string& text) {
  Hash hash;
  hash.add(text);
  return static_cast<double>((hash.value() >> 13) + 1);
}

}  // namespace

// ---- Metric ----

Metric::Metric(int64_t numbers) {
  TORCH_CHECK(numbers >= 0, "Metric: it has ", numbers, " numbers; it must have 0 or more");
  numbers_.resize(static_cast<size_t>(numbers));
}

void Metric::reset() {
  std::fill(numbers_.begin(), numbers_.end(), 0.0);
  others_.clear();
  on_device_.reset();
  reduced_ = false;
}

double* Metric::begin_update() {
  if (reduced_) reset();
  const int current = VirtualRanks::current_of_process();
  if (current == virtual_rank_) return numbers_.data();
  take_from_device();
  std::vector<double>& there = others_.try_emplace(current, numbers_.size(), 0.0).first->second;
  std::vector<double> next = std::move(there);
  others_.erase(current);
  others_[virtual_rank_] = std::exchange(numbers_, std::move(next));
  virtual_rank_ = current;
  return numbers_.data();
}

void Metric::add(const at::Tensor& numbers) {
  begin_update();
  on_device_ = on_device_.defined() ? on_device_ + numbers : numbers;
}

void Metric::take_from_device() const {
  if (!on_device_.defined()) return;
  const at::Tensor here = on_device_.cpu().contiguous();
  const double* counted = here.const_data_ptr<double>();
  for (size_t i = 0; i < numbers_.size(); ++i) numbers_[i] += counted[i];
  on_device_.reset();
}

const std::vector<double>& Metric::numbers() const {
  take_from_device();
  if (others_.empty()) return numbers_;
  sum_ = numbers_;
  for (const auto& [virtual_rank, counted] : others_)
    for (size_t i = 0; i < sum_.size(); ++i) sum_[i] += counted[i];
  return sum_;
}

std::vector<double> Metric::counted_for(int virtual_rank) const {
  take_from_device();
  if (virtual_rank == virtual_rank_) return numbers_;
  const auto found = others_.find(virtual_rank);
  return found != others_.end() ? found->second : std::vector<double>(numbers_.size());
}

void Metric::set_reduced(const double* numbers) {
  std::copy_n(numbers, numbers_.size(), numbers_.begin());
  others_.clear();
  on_device_.reset();
  reduced_ = true;
}

// ---- Mean: sum of value * weight, sum of weights ----

void Mean::update(double value, int64_t weight) {
  TORCH_CHECK(weight >= 0, "Mean: the weight is ", weight, ", expected none below 0");
  double* numbers = begin_update();
  // A value without weight, such as the NaN of an empty batch, must not spoil the sum.
  if (weight == 0) return;
  numbers[0] += value * static_cast<double>(weight);
  numbers[1] += static_cast<double>(weight);
}

void Mean::update(const at::Tensor& value, int64_t weight) {
  TORCH_CHECK(weight >= 0, "Mean: the weight is ", weight, ", expected none below 0");
  TORCH_CHECK(value.defined(),
              "Mean: the value is an undefined tensor; check whether it was moved from or never computed");
  TORCH_CHECK(!value.is_complex(), "Mean: the value is a complex number; pass its real part, or its absolute value");
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
  for (const auto& [other, there] : metrics_) TORCH_CHECK(other != name, "Metrics: `", name, "` was already added");
  metrics_.emplace_back(name, std::move(metric));
}

std::string Metrics::description() const {
  std::string lines;
  for (const auto& [name, metric] : metrics_) {
    const Metric& counted = *metric;
    const std::string options = counted.options();
    lines += name + ": " + c10::demangle(typeid(counted).name()) + (options.empty() ? "" : "(" + options + ")") + ", " +
             std::to_string(counted.numbers_.size()) + " numbers\n";
  }
  return lines;
}

std::vector<double> Metrics::reduce_virtual_ranks(const Group& group) const {
  const VirtualRanks& ranks = *state_of(group).virtual_ranks;
  const LeafRange block = ranks.block();
  // One row per virtual rank. Counts made outside any of them are added to the block's first.
  std::vector<double> rows;
  const int most = (ranks.count() + ranks.world_size() - 1) / ranks.world_size();
  size_t width = 0;
  for (int v = block.first; v < block.first + most; ++v) {
    const size_t begin = rows.size();
    for (const auto& [name, metric] : metrics_) {
      std::vector<double> counted = metric->counted_for(block.contains(v) ? v : -2);
      const std::vector<double> outside = metric->counted_for(v == block.first ? -1 : -2);
      for (size_t i = 0; i < counted.size(); ++i) rows.push_back(counted[i] + outside[i]);
    }
    width = rows.size() - begin;
  }
  const at::Tensor all = group.all_gather(tensor_of(rows.data(), rows.size()));
  std::vector<at::Tensor> leaves;
  for (int v = 0; v < ranks.count(); ++v) {
    const int rank = ranks.owner(v), place = v - block_of(rank, ranks.world_size(), ranks.count()).first;
    leaves.push_back(all[rank].narrow(0, static_cast<int64_t>(place * width), static_cast<int64_t>(width)));
  }
  for (const auto& [into, from] : plan_combination(ranks.count(), ranks.count()).sums)
    leaves[static_cast<size_t>(into)].add_(leaves[static_cast<size_t>(from)]);
  const double* sums = leaves.front().const_data_ptr<double>();
  return {sums, sums + width};
}

void Metrics::reduce(const Group& group, bool failed) {
  const OperationLabel label("Metrics::reduce()");
  const auto& virtual_ranks = state_of(group).virtual_ranks;
  const bool several = virtual_ranks && !virtual_ranks->one_each();
  const std::string counted = description();
  const auto ranks = static_cast<size_t>(group.world_size()), first = ranks + kNumbersInFirstMessage;
  std::vector<double> numbers(ranks);
  numbers[static_cast<size_t>(group.rank())] = failed ? kFailed : number_of(counted);
  for (const auto& [name, metric] : metrics_) {
    metric->begin_update();  // a rank without a sample since the last time contributes nothing
    if (!several) numbers.insert(numbers.end(), metric->numbers().begin(), metric->numbers().end());
  }
  if (numbers.size() < first) numbers.resize(first);
  group.all_reduce(tensor_of(numbers.data(), first));
  if (failed) return;
  for (size_t rank = 0; rank < ranks; ++rank)
    if (numbers[rank] == kFailed)
      throw Error("rank " + std::to_string(group.rank()) + ": the metrics cannot be reduced, because rank " +
                  std::to_string(rank) + " failed before; see its own message for the reason");
  if (std::any_of(numbers.begin(), numbers.begin() + group.world_size(), [&](double n) { return n != numbers[0]; }))
    throw Error("the metrics cannot be reduced, because ranks count different things: " +
                first_difference("metric", group.all_gather_bytes(counted)) +
                ". Every rank must add the same metrics, with the same options, in the same order");
  if (several) {
    const std::vector<double> sums = reduce_virtual_ranks(group);
    numbers.resize(ranks);
    numbers.insert(numbers.end(), sums.begin(), sums.end());
  } else if (numbers.size() > first) {
    group.all_reduce(tensor_of(numbers.data() + first, numbers.size() - first));
  }
  const double* next = numbers.data() + ranks;
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
  for (const auto& [name, value] : values()) text += (text.empty() ? "" : "  ") + name + " " + formatted("%.4f", value);
  return text;
}

// ---- evaluation ----

EvaluationMode::EvaluationMode(torch::nn::Module& module) : module_(module) {
  was_training_.push_back(module.is_training());
  for (const auto& part : module.modules(/*include_self=*/false)) was_training_.push_back(part->is_training());
  module.eval();
}

EvaluationMode::~EvaluationMode() {
  // A module also sets its submodules, so each submodule is set after the module around it.
  size_t next = 0;
  module_.train(was_training_[next++]);
  for (const auto& part : module_.modules(/*include_self=*/false))
    if (next < was_training_.size()) part->train(was_training_[next++]);
}

void detail::check_evaluation(const LoaderBase& loader, const Group& group) {
  TORCH_CHECK(loader.options().exactly_once,
              "evaluate: this loader repeats samples to give all ranks equally many; make it with exactly_once = true");
  TORCH_CHECK(loader.world_size() == group.world_size() && loader.rank() == group.rank(),
              "evaluate: the loader is rank ", loader.rank(), " of ", loader.world_size(), ", the group's is ",
              group.rank(), " of ", group.world_size());
  check_same_data(group, loader, LoaderFacts::kNextPass);
}

}  // namespace lockstep
