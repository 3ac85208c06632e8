#include "nn/batch_statistics.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/autograd.h>

#include "collectives/operand_checks.h"
#include "nn/input_gradient.h"

// Local sums come from torch's fused kernels if the input is in CPU memory, and otherwise from plain operators. (Double
// inputs, which are rare, also use these, so that tests cover that path.) Between ranks everything is double.
//
// The ranks' means and variances are combined by Chan, Golub and LeVeque's formula: the variance over all ranks is the
// mean of the variances plus the variance of the means, both weighted by count. Nothing cancels as it would in
// E[x^2] - E[x]^2.

namespace lockstep {
namespace {

at::ScalarType accumulation_type(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

bool has_fused_kernels(const at::Tensor& input) { return input.is_cpu() && input.scalar_type() != at::kDouble; }

std::vector<int64_t> reduced_dims(const at::Tensor& input) {
  std::vector<int64_t> dims(static_cast<size_t>(input.dim()));
  std::iota(dims.begin(), dims.end(), 0);
  dims.erase(dims.begin() + 1);
  return dims;
}

double values_a_channel(const at::Tensor& input) {
  return static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
}

/// Mean and variance (biased) of this rank's values; zeros if there are none.
std::pair<at::Tensor, at::Tensor> local_statistics(const at::Tensor& input) {
  const auto options = input.options().dtype(accumulation_type(input));
  const at::Tensor zeros = at::zeros({input.size(1)}, options);
  if (input.numel() == 0) return {zeros, zeros};
  if (has_fused_kernels(input)) {
    const auto [mean, var] = at::batch_norm_update_stats(input, zeros, zeros.clone(), /*momentum=*/0);
    return {mean, var};
  }
  const auto [var, mean] = at::var_mean(input.to(options.dtype()), reduced_dims(input), /*unbiased=*/false);
  return {mean, var};
}

/// Writes the elements to `out`.
void copy_out(const at::Tensor& values, double* out) {
  const at::Tensor here = values.to(at::kCPU, at::kDouble).contiguous();
  std::copy_n(here.const_data_ptr<double>(), here.numel(), out);
}
void copy_floats_out(const at::Tensor& values, double* out) {
  std::copy_n(values.const_data_ptr<float>(), values.numel(), out);
}

/// A layer's message: two lists of one number per channel, and one more number; eps and momentum in its header.
at::Tensor make_row(const at::Tensor& first, const at::Tensor& second, double last, double eps = 0,
                    double momentum = 0) {
  const int64_t channels = first.numel();
  at::Tensor row = at::empty({StatisticsExchange::kHeader + 2 * channels + 1}, at::kDouble);
  double* const values = row.mutable_data_ptr<double>() + StatisticsExchange::kHeader;
  values[-2] = eps;
  values[-1] = momentum;
  const bool floats = first.is_cpu() && first.scalar_type() == at::kFloat;
  (floats ? copy_floats_out : copy_out)(first, values);
  (floats ? copy_floats_out : copy_out)(second, values + channels);
  values[2 * channels] = last;
  return row;
}

/// The ranks' messages, after their headers.
class Rows {
 public:
  explicit Rows(at::Tensor rows) : rows_(std::move(rows)), values_(rows_.const_data_ptr<double>()) {}
  int64_t count() const { return rows_.size(0); }
  const double* operator[](int64_t rank) const { return values_ + rank * rows_.size(1) + StatisticsExchange::kHeader; }

 private:
  at::Tensor rows_;
  const double* values_;
};

/// Mean and variance over all ranks' values.
struct Combined {
  Combined(const Rows& rows, int64_t channels) : mean(static_cast<size_t>(channels)), var(mean.size()) {
    for (int64_t rank = 0; rank < rows.count(); ++rank) count += rows[rank][2 * channels];
    for (int64_t rank = 0; rank < rows.count(); ++rank) {
      const double share = rows[rank][2 * channels] / std::max(count, 1.0);
      for (size_t c = 0; c < mean.size(); ++c) mean[c] += share * rows[rank][c];
    }
    for (int64_t rank = 0; rank < rows.count(); ++rank) {
      const double* const means = rows[rank];
      const double* const vars = means + channels;
      const double share = means[2 * channels] / std::max(count, 1.0);
      for (size_t c = 0; c < mean.size(); ++c)
        var[c] += share * (vars[c] + (means[c] - mean[c]) * (means[c] - mean[c]));
    }
  }

  double count = 0;
  std::vector<double> mean, var;
};

/// One number for each channel, by `value(c)`, in the dtype and on the device of `options`.
template <typename Value>
at::Tensor by_channel(int64_t channels, const at::TensorOptions& options, const Value& value) {
  at::Tensor values = at::empty({channels}, options.device(at::kCPU));
  if (values.scalar_type() == at::kFloat) {
    auto* const data = values.mutable_data_ptr<float>();
    for (int64_t c = 0; c < channels; ++c) data[c] = static_cast<float>(value(static_cast<size_t>(c)));
  } else {
    auto* const data = values.mutable_data_ptr<double>();
    for (int64_t c = 0; c < channels; ++c) data[c] = value(static_cast<size_t>(c));
  }
  return options.device().is_cpu() ? values : values.to(options.device());
}

void update_running(const at::Tensor& running, const std::vector<double>& values, double factor, double momentum) {
  if (!running.defined()) return;
  if (running.is_cpu() && running.scalar_type() == at::kFloat && running.is_contiguous()) {
    auto* const data = running.mutable_data_ptr<float>();
    const auto rest = static_cast<float>(1 - momentum), part = static_cast<float>(momentum);
    for (size_t c = 0; c < values.size(); ++c) data[c] = data[c] * rest + static_cast<float>(values[c] * factor) * part;
    note_written(running);
    return;
  }
  const auto options = running.options().dtype(at::kDouble);
  const at::Tensor value = by_channel(running.numel(), options, [&](size_t c) { return values[c] * factor; });
  at::Tensor(running).mul_(1 - momentum).add_(value.to(running.scalar_type()), momentum);
}

/// (sum of dy, sum of dy * normalized x) over this rank's values.
std::pair<at::Tensor, at::Tensor> local_sums(const at::Tensor& grad_output, const at::Tensor& input,
                                             const BatchStatistics& statistics) {
  const at::Tensor& mean = statistics.mean;
  if (input.numel() == 0) return {at::zeros_like(mean), at::zeros_like(mean)};
  if (has_fused_kernels(input)) {
    const auto gradients = at::native_batch_norm_backward(
        grad_output, input, at::ones_like(mean), /*running_mean=*/at::Tensor(), /*running_var=*/at::Tensor(), mean,
        statistics.invstd, /*train=*/true, /*eps=*/0, {false, true, true});
    return {std::get<2>(gradients), std::get<1>(gradients)};
  }
  const at::Tensor dy = grad_output.to(mean.scalar_type());
  const at::Tensor x = (input - beside(mean, input)) * beside(statistics.invstd, input);
  return {dy.sum(reduced_dims(input)), (dy * x).sum(reduced_dims(input))};
}

}  // namespace

Normalized normalize(const at::Tensor& input, const BatchNormArguments& arguments, const LayerExchange& layer) {
  const int64_t channels = input.size(1);
  for (const at::Tensor* one : {&arguments.weight, &arguments.bias, &arguments.running_mean, &arguments.running_var})
    TORCH_CHECK(!one->defined() || one->numel() == channels, "batch norm of ", one->numel(),
                " channels got an input of ", input.sizes());
  const auto dtype = accumulation_type(input);
  const auto [local_mean, local_var] = local_statistics(input);
  const at::Tensor row = make_row(local_mean, local_var, values_a_channel(input), arguments.eps, arguments.momentum);
  const Combined all(Rows(layer.exchange->gather(layer.number, Pass::kForward, row)), channels);
  TORCH_CHECK(all.count != 1,
              "Expected more than 1 value per channel when training; there is only one over all ranks; input size ",
              input.sizes());
  if (all.count > 0) {
    update_running(arguments.running_mean, all.mean, 1, arguments.momentum);
    update_running(arguments.running_var, all.var, all.count / (all.count - 1), arguments.momentum);
  }
  const auto options = input.options().dtype(dtype);
  const auto narrow = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(dtype) : tensor; };
  Normalized result{
      .output = {},
      .statistics = {by_channel(channels, options, [&](size_t c) { return all.mean[c]; }),
                     by_channel(channels, options, [&](size_t c) { return 1 / std::sqrt(all.var[c] + arguments.eps); }),
                     all.count}};
  if (input.numel() == 0) {
    result.output = at::empty_like(input);
    return result;
  }
  const at::Tensor var = by_channel(channels, options, [&](size_t c) { return all.var[c]; });
  result.output = std::get<0>(at::native_batch_norm(input, narrow(arguments.weight), narrow(arguments.bias),
                                                    result.statistics.mean, var, /*training=*/false,
                                                    /*momentum=*/0, arguments.eps));
  return result;
}

BatchNormGradients differentiate(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                 const BatchStatistics& statistics, const LayerExchange& layer) {
  const int64_t channels = input.size(1);
  const auto dtype = accumulation_type(input);
  const at::Tensor dy = grad_output.contiguous(input.suggest_memory_format());
  const auto [sum_dy, sum_dy_x] = local_sums(dy, input, statistics);
  const Rows rows(layer.exchange->gather(layer.number, Pass::kBackward, make_row(sum_dy, sum_dy_x, 0)));
  BatchNormGradients gradients{.input = {}, .weight = sum_dy_x, .bias = sum_dy};
  if (input.numel() == 0) {
    gradients.input = at::empty_like(input);
    return gradients;
  }
  const auto mean = [&](size_t index) {
    double sum = rows[0][index];
    for (int64_t rank = 1; rank < rows.count(); ++rank) sum += rows[rank][index];
    return sum / std::max(statistics.count, 1.0);
  };
  const auto options = input.options().dtype(dtype);
  const at::Tensor mean_dy = by_channel(channels, options, mean);
  const at::Tensor mean_dy_x =
      by_channel(channels, options, [&](size_t c) { return mean(c + static_cast<size_t>(channels)); });
  gradients.input =
      input_gradient(dy, input,
                     {.mean = statistics.mean,
                      .invstd = statistics.invstd,
                      .scale = weight.defined() ? weight.to(dtype) * statistics.invstd : statistics.invstd,
                      .mean_dy = mean_dy,
                      .mean_dy_x = mean_dy_x});
  return gradients;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(std::shared_ptr<LayerExchange> of) : layer(std::move(of)) {}
  std::shared_ptr<LayerExchange> layer;
};

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  /// `weight` and `bias` are passed separately although `arguments` has them, so that autograd sees them.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/, const std::optional<at::Tensor>& /*bias*/,
                            const BatchNormArguments& arguments, const std::shared_ptr<LayerExchange>& layer) {
    const Normalized result = normalize(input, arguments, *layer);
    context->save_for_backward({input, arguments.weight, result.statistics.mean, result.statistics.invstd});
    context->saved_data["count"] = result.statistics.count;
    context->saved_data["has_bias"] = arguments.bias.defined();
    context->saved_data["layer"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(layer));
    return result.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK(
        !at::GradMode::is_enabled(),
        "backward(create_graph) goes through a synchronised batch norm, whose gradient cannot be differentiated again");
    const variable_list saved = context->get_saved_variables();
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(context->saved_data["layer"].toCapsule());
    const BatchNormGradients gradients =
        differentiate(grad_outputs[0], saved[0], saved[1],
                      {saved[2], saved[3], context->saved_data["count"].toDouble()}, *holder->layer);
    const auto dtype = (saved[1].defined() ? saved[1] : gradients.weight).scalar_type();
    return {gradients.input, saved[1].defined() ? gradients.weight.to(dtype) : at::Tensor(),
            context->saved_data["has_bias"].toBool() ? gradients.bias.to(dtype) : at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormArguments& arguments,
                           const std::shared_ptr<LayerExchange>& layer) {
  const auto given = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return SyncBatchNormFunction::apply(input, given(arguments.weight), given(arguments.bias), arguments, layer);
}

}  // namespace lockstep
