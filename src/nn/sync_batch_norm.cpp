#include <lockstep/sync_batch_norm.h>

#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "nn/batch_norm_operator.h"
#include "nn/batch_statistics.h"
#include "nn/statistics_exchange.h"

namespace lockstep {
namespace {

/// A layer that can be converted.
struct Found {
  at::Tensor running_mean, weight;  ///< one of them may be undefined
  int64_t channels;
  std::function<bool()> is_training;
};

struct Findings {
  std::vector<Found> layers;
  std::string problems;
};

/// Adds the layer, or why it cannot be converted.
void add(Findings& findings, const std::string& name, const at::Tensor& running_mean, const at::Tensor& weight,
         std::function<bool()> is_training) {
  if (!running_mean.defined() && !weight.defined()) {
    findings.problems += "\n  " + name +
                         " has neither parameters nor running statistics, by which it could be known; "
                         "declare a lockstep::SyncBatchNorm in its place";
    return;
  }
  const int64_t channels = (running_mean.defined() ? running_mean : weight).numel();
  findings.layers.push_back({running_mean, weight, channels, std::move(is_training)});
}

template <typename Layer>
bool look_at(Findings& findings, const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  const auto layer = std::dynamic_pointer_cast<Layer>(module);
  if (!layer) return false;
  const torch::nn::Module& object = *layer;
  if (typeid(object) != typeid(Layer)) {
    findings.problems += "\n  " + name +
                         " is of a class derived from BatchNorm, whose forward may do anything; derive "
                         "it from lockstep::SyncBatchNorm, or hold one";
    return true;
  }
  add(findings, name, layer->running_mean, layer->weight, [weak = std::weak_ptr<torch::nn::Module>(module)] {
    const auto alive = weak.lock();
    return alive && alive->is_training();
  });
  return true;
}

void look_at_any(Findings& findings, const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  using namespace torch::nn;  // NOLINT
  look_at<BatchNorm1dImpl>(findings, name, module) || look_at<BatchNorm2dImpl>(findings, name, module) ||
      look_at<BatchNorm3dImpl>(findings, name, module);
}

int64_t convert(const Findings& findings, const Group& group) {
  TORCH_CHECK(findings.problems.empty(),
              "convert_sync_batchnorm: nothing was converted, because for some layers that "
              "would have no effect, or an unknown one:",
              findings.problems);
  TORCH_CHECK(!findings.layers.empty(), "convert_sync_batchnorm: the module has no BatchNorm1d, 2d or 3d");
  const auto exchange = StatisticsExchange::of(group);
  for (const Found& layer : findings.layers) {
    if (group.world_size() == 1) break;  // its own batch is all there is
    exchange->expect(layer.channels, (layer.running_mean.defined() ? layer.running_mean : layer.weight).device());
    for (const at::Tensor& tensor : {layer.running_mean, layer.weight})
      if (tensor.defined()) synchronize_calls_with(tensor, {exchange, layer.is_training});
  }
  return static_cast<int64_t>(findings.layers.size());
}

/// Alive but not owned by anybody the conversion could ask: for a module that is a layer itself.
std::shared_ptr<torch::nn::Module> itself(torch::nn::Module& module) {
  return module.modules(/*include_self=*/true).front();
}

}  // namespace

int64_t convert_sync_batchnorm(torch::nn::Module& module, const Group& group) {
  Findings findings;
  const auto children = module.named_modules("", /*include_self=*/false);
  for (const auto& item : children) look_at_any(findings, item.key(), item.value());
  if (children.is_empty()) look_at_any(findings, "the module", itself(module));
  return convert(findings, group);
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& like, const Group& group)
    : NormImplBase(like), exchange_(StatisticsExchange::of(group)) {
  remember();
}

void SyncBatchNormImpl::reset() {
  NormImplBase::reset();
  remember();
}

void SyncBatchNormImpl::remember() {
  if (exchange_->group.world_size() == 1) return;
  exchange_->expect(options.num_features(), at::kCPU);
  for (const at::Tensor& tensor : {running_mean, weight})
    if (tensor.defined()) synchronize_calls_with(tensor, {exchange_, nullptr});
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::SyncBatchNorm(" << options.num_features() << ", ranks=" << exchange_->group.world_size() << ")";
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "SyncBatchNorm: input is [batch, channels, ...], not ", input.sizes());
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  double momentum = options.momentum().value_or(0);
  if (is_training() && options.track_running_stats()) {
    num_batches_tracked += 1;
    if (!options.momentum()) momentum = 1 / num_batches_tracked.item<double>();
  }
  if (is_training() && exchange_->group.world_size() > 1)
    return sync_batch_norm(input, {weight, bias, running_mean, running_var, momentum, options.eps()}, exchange_);
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   is_training() || !options.track_running_stats(), momentum,
                                                   options.eps());
}

}  // namespace lockstep
