#include "nn/batch_statistics.h"

#include <array>
#include <numeric>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/autograd.h>

// Local sums come from torch's fused kernels if the input is in CPU memory, and otherwise from plain operators. (So do
// those of double inputs, which are rare; this way the tests cover that path.) Between ranks everything is double.
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

/// [channels] as [1, channels, 1, ...].
at::Tensor beside(const at::Tensor& values, const at::Tensor& input) {
  std::vector<int64_t> shape(static_cast<size_t>(input.dim()), 1);
  shape[1] = values.numel();
  return values.view(shape);
}

double values_a_channel(const at::Tensor& input) {
  return static_cast<double>(input.numel()) / static_cast<double>(input.size(1));
}

/// Mean and variance (biased) of this rank's values; zeros where there are none.
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

void update_running(const at::Tensor& running, const at::Tensor& value, double momentum) {
  if (running.defined()) at::Tensor(running).mul_(1 - momentum).add_(value.to(running.scalar_type()), momentum);
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

Normalized normalize(const at::Tensor& input, const BatchNormArguments& arguments, StatisticsExchange& exchange) {
  const int64_t channels = input.size(1);
  for (const at::Tensor* one : {&arguments.weight, &arguments.bias, &arguments.running_mean, &arguments.running_var})
    TORCH_CHECK(!one->defined() || one->numel() == channels, "batch norm of ", one->numel(),
                " channels got an input of ", input.sizes());
  const auto dtype = accumulation_type(input);
  const auto wide = input.options().dtype(at::kDouble);
  const auto [local_mean, local_var] = local_statistics(input);
  const at::Tensor table = exchange.gather(
      at::cat({local_mean.to(at::kDouble), local_var.to(at::kDouble), at::full({1}, values_a_channel(input), wide)}));
  const at::Tensor counts = table.narrow(1, 2 * channels, 1), means = table.narrow(1, 0, channels),
                   vars = table.narrow(1, channels, channels);
  const double count = counts.sum().item<double>();
  TORCH_CHECK(count != 1,
              "Expected more than 1 value per channel when training; there is only one over all ranks; input size ",
              input.sizes());
  const at::Tensor shares = counts / std::max(count, 1.0);
  const at::Tensor mean = (means * shares).sum(0);
  const at::Tensor var = ((vars + (means - mean).square()) * shares).sum(0);
  if (count > 0) {
    update_running(arguments.running_mean, mean, arguments.momentum);
    update_running(arguments.running_var, var * (count / (count - 1)), arguments.momentum);
  }
  const auto narrow = [&](const at::Tensor& tensor) { return tensor.defined() ? tensor.to(dtype) : tensor; };
  Normalized result{.output = at::empty_like(input),
                    .statistics = {mean.to(dtype), (var + arguments.eps).rsqrt().to(dtype), count}};
  if (input.numel() > 0)
    result.output = std::get<0>(at::native_batch_norm(input, narrow(arguments.weight), narrow(arguments.bias),
                                                      result.statistics.mean, var.to(dtype), /*training=*/false,
                                                      /*momentum=*/0, arguments.eps));
  return result;
}

BatchNormGradients differentiate(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                 const BatchStatistics& statistics, StatisticsExchange& exchange) {
  const int64_t channels = input.size(1);
  const auto dtype = accumulation_type(input);
  const at::Tensor dy = grad_output.contiguous(input.suggest_memory_format());
  const auto [sum_dy, sum_dy_x] = local_sums(dy, input, statistics);
  const at::Tensor means = exchange.sum(at::cat({sum_dy.to(at::kDouble), sum_dy_x.to(at::kDouble)}))
                               .div_(std::max(statistics.count, 1.0))
                               .to(dtype);
  BatchNormGradients gradients{.input = at::empty_like(input), .weight = sum_dy_x, .bias = sum_dy};
  if (input.numel() == 0) return gradients;
  // weight * invstd * (dy - mean of dy - normalized x * mean of (dy * normalized x))
  const at::Tensor scale = weight.defined() ? weight.to(dtype) * statistics.invstd : statistics.invstd;
  const at::Tensor slope = -scale * statistics.invstd * means.narrow(0, channels, channels);
  const at::Tensor offset = -scale * means.narrow(0, 0, channels);
  at::Tensor gradient = input - beside(statistics.mean, input);  // float if the input is half
  gradient.mul_(beside(slope, input)).addcmul_(dy.to(dtype), beside(scale, input)).add_(beside(offset, input));
  gradients.input = gradient.to(input.scalar_type());
  return gradients;
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct Holder : torch::CustomClassHolder {
  explicit Holder(std::shared_ptr<StatisticsExchange> of) : exchange(std::move(of)) {}
  std::shared_ptr<StatisticsExchange> exchange;
};

struct SyncBatchNormFunction : torch::autograd::Function<SyncBatchNormFunction> {
  /// `weight` and `bias` are passed separately although `arguments` has them, so that autograd sees them.
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& /*weight*/, const std::optional<at::Tensor>& /*bias*/,
                            const BatchNormArguments& arguments, const std::shared_ptr<StatisticsExchange>& exchange) {
    const Normalized result = normalize(input, arguments, *exchange);
    context->save_for_backward({input, arguments.weight, result.statistics.mean, result.statistics.invstd});
    context->saved_data["count"] = result.statistics.count;
    context->saved_data["has_bias"] = arguments.bias.defined();
    context->saved_data["exchange"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(exchange));
    return result.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "backward(create_graph) goes through a synchronised batch norm, whose gradient has none of its own");
    const variable_list saved = context->get_saved_variables();
    const auto holder = c10::static_intrusive_pointer_cast<Holder>(context->saved_data["exchange"].toCapsule());
    const BatchNormGradients gradients =
        differentiate(grad_outputs[0], saved[0], saved[1],
                      {saved[2], saved[3], context->saved_data["count"].toDouble()}, *holder->exchange);
    const auto dtype = (saved[1].defined() ? saved[1] : gradients.weight).scalar_type();
    return {gradients.input, saved[1].defined() ? gradients.weight.to(dtype) : at::Tensor(),
            context->saved_data["has_bias"].toBool() ? gradients.bias.to(dtype) : at::Tensor(), at::Tensor(),
            at::Tensor()};
  }
};

}  // namespace

at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormArguments& arguments,
                           const std::shared_ptr<StatisticsExchange>& exchange) {
  const auto given = [](const at::Tensor& tensor) { return tensor.defined() ? std::optional(tensor) : std::nullopt; };
  return SyncBatchNormFunction::apply(input, given(arguments.weight), given(arguments.bias), arguments, exchange);
}

}  // namespace lockstep
