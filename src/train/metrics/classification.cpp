#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/metrics.h>

#include <cmath>
#include <limits>

#include "train/metrics/counting.h"

namespace lockstep {
namespace {

double ratio(double part, double whole) { return part / whole; }  // NaN if there is nothing

void check_target(const char* metric, const at::Tensor& target) {
  TORCH_CHECK(target.defined(), metric,
              ": the targets are an undefined tensor; check whether it was moved from or never computed");
  TORCH_CHECK(target.scalar_type() == at::kLong, metric, ": targets are ", target.scalar_type(),
              ", expected int64 classes");
}

/// [n, classes] of a type used for counting; float32 holds every half and bfloat16.
at::Tensor rows_of(const char* metric, const at::Tensor& scores, const at::Tensor& target) {
  check_target(metric, target);
  TORCH_CHECK(scores.defined(), metric,
              ": the scores are an undefined tensor; check whether it was moved from or never computed");
  TORCH_CHECK(scores.is_floating_point(), metric, ": scores are ", scores.scalar_type(), ", expected floating point");
  TORCH_CHECK(scores.dim() == target.dim() + 1 && scores.sizes().slice(0, target.dim()) == target.sizes(), metric,
              ": scores ", scores.sizes(), " do not go with targets ", target.sizes(),
              "; expected [..., classes] and [...]");
  TORCH_CHECK(scores.size(-1) > 0, metric, ": scores of no class");
  const bool narrow = scores.scalar_type() != at::kFloat && scores.scalar_type() != at::kDouble;
  return (narrow ? scores.detach().to(at::kFloat) : scores.detach()).contiguous().view({-1, scores.size(-1)});
}

}  // namespace

// ---- Accuracy: correct, counted ----

Accuracy::Accuracy(AccuracyOptions options) : Metric(2), options_(options) {
  TORCH_CHECK(options.top_k >= 1, "Accuracy: top_k is ", options.top_k, ", expected at least 1");
}

void Accuracy::update(const at::Tensor& scores, const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  const at::Tensor rows = rows_of("Accuracy", scores, target);
  TORCH_CHECK(options_.top_k <= rows.size(1), "Accuracy: top_k is ", options_.top_k, " of ", rows.size(1), " classes");
  const at::Tensor targets = target.contiguous().view({-1});
  if (!rows.device().is_cpu())
    return add(counting::correct_there(rows, targets, options_.top_k, options_.ignore_index));
  const auto [correct, counted] = counting::correct_here(rows, targets, options_.top_k, options_.ignore_index);
  double* numbers = begin_update();
  numbers[0] += static_cast<double>(correct);
  numbers[1] += static_cast<double>(counted);
}

double Accuracy::value() const { return ratio(numbers()[0], numbers()[1]); }
int64_t Accuracy::correct() const { return std::llround(numbers()[0]); }
int64_t Accuracy::count() const { return std::llround(numbers()[1]); }
void Accuracy::append_values(const std::string& name, MetricValues& values) const {
  values.emplace_back(name, value());
}

std::string Accuracy::options() const {
  return "top_k " + std::to_string(options_.top_k) + ", ignore_index " + std::to_string(options_.ignore_index);
}

// ---- ConfusionMatrix: rows of counts ----

ConfusionMatrix::ConfusionMatrix(int64_t classes, int64_t ignore_index)
    : Metric([&] {
        constexpr int64_t kMost = 1 << 15;  // the counts then take 8 GiB
        TORCH_CHECK(classes >= 1 && classes <= kMost, "ConfusionMatrix: ", classes, " classes, expected 1 to ", kMost);
        return classes * classes;
      }()),
      classes_(classes),
      ignore_index_(ignore_index) {}

void ConfusionMatrix::update(const at::Tensor& scores, const at::Tensor& target) {
  const at::NoGradGuard no_grad;
  const bool cpu = scores.device().is_cpu();
  at::Tensor predicted;
  if (scores.scalar_type() == at::kLong) {
    check_target("ConfusionMatrix", target);
    TORCH_CHECK(scores.sizes() == target.sizes(), "ConfusionMatrix: predictions ", scores.sizes(),
                " do not go with targets ", target.sizes());
    predicted = scores.contiguous().view({-1});
  } else {
    const at::Tensor rows = rows_of("ConfusionMatrix", scores, target);
    TORCH_CHECK(rows.size(1) == classes_, "ConfusionMatrix: scores of ", rows.size(1), " classes, expected ", classes_);
    predicted = cpu ? counting::best_here(rows) : rows.argmax(1);
  }
  const at::Tensor targets = target.contiguous().view({-1});
  if (cpu)
    counting::confusion_here(predicted, targets, classes_, ignore_index_, begin_update());
  else
    add(counting::confusion_there(predicted, targets, classes_, ignore_index_));
}

at::Tensor ConfusionMatrix::counts() const {
  return at::tensor(numbers(), at::kDouble).to(at::kLong).view({classes_, classes_});
}

double ConfusionMatrix::row_sum(int64_t row) const {
  double sum = 0;
  for (int64_t i = 0; i < classes_; ++i) sum += at(row, i);
  return sum;
}

double ConfusionMatrix::column_sum(int64_t column) const {
  double sum = 0;
  for (int64_t i = 0; i < classes_; ++i) sum += at(i, column);
  return sum;
}

double ConfusionMatrix::accuracy() const {
  double correct = 0, all = 0;
  for (int64_t i = 0; i < classes_; ++i) correct += at(i, i);
  for (const double count : numbers()) all += count;
  return ratio(correct, all);
}

double ConfusionMatrix::precision(int64_t of) const {
  TORCH_CHECK_INDEX(of >= 0 && of < classes_, "class ", of, " of ", classes_);
  return at(of, of) > 0 ? at(of, of) / column_sum(of) : 0;
}

double ConfusionMatrix::recall(int64_t of) const { return support(of) > 0 ? at(of, of) / row_sum(of) : 0; }

double ConfusionMatrix::f1(int64_t of) const {
  const double sum = precision(of) + recall(of);
  return sum > 0 ? 2 * precision(of) * recall(of) / sum : 0;
}

int64_t ConfusionMatrix::support(int64_t of) const {
  TORCH_CHECK_INDEX(of >= 0 && of < classes_, "class ", of, " of ", classes_);
  return std::llround(row_sum(of));
}

std::string ConfusionMatrix::options() const {
  return std::to_string(classes_) + " classes, ignore_index " + std::to_string(ignore_index_);
}

void ConfusionMatrix::append_values(const std::string& name, MetricValues& values) const {
  double precisions = 0, recalls = 0, f1s = 0, there = 0;
  for (int64_t i = 0; i < classes_; ++i) {
    if (row_sum(i) + column_sum(i) == 0) continue;
    precisions += precision(i);
    recalls += recall(i);
    f1s += f1(i);
    there += 1;
  }
  values.emplace_back(name + "_accuracy", accuracy());
  values.emplace_back(name + "_precision", ratio(precisions, there));
  values.emplace_back(name + "_recall", ratio(recalls, there));
  values.emplace_back(name + "_f1", ratio(f1s, there));
}

}  // namespace lockstep
