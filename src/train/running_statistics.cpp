#include <lockstep/running_statistics.h>

#include <cmath>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <lockstep/error.h>

#include "base/rank_names.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

/// The number of samples, their mean, and the sum of squared differences from it.
struct Moments {
  double count = 0;
  at::Tensor mean, squares;

  /// samples: [n, features] in double.
  static Moments of(const at::Tensor& samples) {
    if (samples.size(0) == 0)
      return {0, at::zeros({samples.size(1)}, at::kDouble), at::zeros({samples.size(1)}, at::kDouble)};
    const at::Tensor mean = samples.mean(0);
    return {static_cast<double>(samples.size(0)), mean, (samples - mean).square().sum(0)};
  }
  void add(const Moments& other) {
    if (other.count == 0) return;
    const double all = count + other.count;
    const at::Tensor apart = other.mean - mean;
    mean = mean + apart * (other.count / all);
    squares = squares + other.squares + apart.square() * (count * other.count / all);
    count = all;
  }
};

/// A rank's message about its samples in place of their number.
constexpr double kOtherShape = -1, kNotFinite = -2;

/// The moments of all ranks' samples, [n, features]. Throws on all ranks if one has a `problem`.
Moments of_all_ranks(const at::Tensor& samples, double problem, int64_t features, const Group& group,
                     const std::string& what) {
  if (problem == 0 && !at::isfinite(samples).all().item<bool>()) problem = kNotFinite;
  const at::Tensor none = at::zeros({0, features}, at::kDouble);
  const Moments own = Moments::of(problem == 0 ? samples : none);
  const at::Tensor count = at::full({1}, problem == 0 ? own.count : problem, at::kDouble);
  const at::Tensor all = group.all_gather(at::cat({count, own.mean, own.squares}));
  Moments sum = Moments::of(none);
  std::vector<bool> other_shape, not_finite;
  for (int64_t rank = 0; rank < all.size(0); ++rank) {
    const at::Tensor row = all[rank];
    const double number = row[0].item<double>();
    other_shape.push_back(number == kOtherShape);
    not_finite.push_back(number == kNotFinite);
    if (number > 0) sum.add({number, row.narrow(0, 1, features), row.narrow(0, 1 + features, features)});
  }
  const auto any = [](const std::vector<bool>& of) { return std::find(of.begin(), of.end(), true) != of.end(); };
  if (any(other_shape)) throw Error(what + ": " + rank_names(other_shape) + " gave samples of another shape");
  if (any(not_finite)) throw Error(what + ": " + rank_names(not_finite) + " gave infinity or NaN");
  return sum;
}

void check_number(const char* name, double value) {
  TORCH_CHECK(std::isfinite(value) && value >= 0, "RunningStatistics: ", name, " is ", value,
              "; it must be finite and at least 0");
}

}  // namespace

RunningStatisticsImpl::RunningStatisticsImpl(std::vector<int64_t> shape, RunningStatisticsOptions options)
    : shape_(std::move(shape)), options_(options) {
  check_number("epsilon", options_.epsilon);
  check_number("limit", options_.limit);
  reset();
}

void RunningStatisticsImpl::reset() {
  mean_ = register_buffer("mean", at::zeros(shape_, at::kDouble));
  squares_ = register_buffer("squares", at::zeros(shape_, at::kDouble));
  count_ = register_buffer("count", at::zeros({}, at::kLong));
}

void RunningStatisticsImpl::update(const at::Tensor& samples, const Group& group) {
  const at::NoGradGuard no_grad;
  const OperationLabel label("RunningStatistics::update()");
  const int64_t features = c10::multiply_integers(shape_);
  const auto dimensions = static_cast<int64_t>(shape_.size());
  const bool fits = samples.defined() && samples.dim() == dimensions + 1 && samples.sizes().slice(1) == shape_;
  const at::Tensor rows = fits ? samples.to(at::kCPU, at::kDouble).reshape({samples.size(0), features}) : at::Tensor();
  const Moments all = of_all_ranks(
      rows, fits ? 0 : kOtherShape, features, group, "RunningStatistics::update(), of [n" + [&] {
        std::string text;
        for (const int64_t size : shape_) text += ", " + std::to_string(size);
        return text;
      }() + "]");
  Moments sum{static_cast<double>(count()), mean_.reshape({features}), squares_.reshape({features})};
  sum.add(all);
  mean_.copy_(sum.mean.view(shape_));
  squares_.copy_(sum.squares.view(shape_));
  count_.fill_(static_cast<int64_t>(sum.count));
}

int64_t RunningStatisticsImpl::count() const { return count_.item<int64_t>(); }

at::Tensor RunningStatisticsImpl::variance() const {
  const int64_t samples = count();
  return samples == 0 ? at::ones_like(squares_) : squares_ / static_cast<double>(samples);
}

at::Tensor RunningStatisticsImpl::forward(const at::Tensor& x) const {
  const at::Tensor normal = (x - mean_.to(x.device())) / (variance() + options_.epsilon).sqrt().to(x.device());
  return (options_.limit > 0 ? normal.clamp(-options_.limit, options_.limit) : normal).to(x.scalar_type());
}

at::Tensor RunningStatisticsImpl::denormalized(const at::Tensor& x) const {
  return (x * (variance() + options_.epsilon).sqrt().to(x.device()) + mean_.to(x.device())).to(x.scalar_type());
}

at::Tensor standardize(const at::Tensor& values, const Group& group, double epsilon) {
  TORCH_CHECK(values.defined(), "standardize(): the tensor is undefined");
  const OperationLabel label("standardize()");
  const Moments all =
      of_all_ranks(values.detach().to(at::kCPU, at::kDouble).reshape({-1, 1}), 0, 1, group, "standardize()");
  const double deviation = all.count < 2 ? 0 : std::sqrt(all.squares.item<double>() / (all.count - 1));
  return ((values - all.mean.item<double>()) / (deviation + epsilon)).to(values.scalar_type());
}

}  // namespace lockstep
