#include <lockstep/sync_batch_norm.h>

#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <lockstep/error.h>

#include "nn/batch_norm_operator.h"
#include "nn/batch_statistics.h"
#include "nn/found_layers.h"
#include "nn/statistics_exchange.h"

namespace lockstep {
namespace {

template <typename Layer>
bool look_at(FoundLayers& found, const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  const auto layer = std::dynamic_pointer_cast<Layer>(module);
  if (!layer) return false;
  const torch::nn::Module& object = *layer;
  if (typeid(object) != typeid(Layer)) {
    found.problems += "\n  " + name +
                      " is of a class derived from BatchNorm, whose forward may do anything; derive it from "
                      "lockstep::SyncBatchNorm, or hold one as a member";
    return true;
  }
  found.add(name, {layer->running_mean, layer->weight, [weak = std::weak_ptr<torch::nn::Module>(module)] {
                     const auto alive = weak.lock();
                     return alive && alive->is_training();
                   }});
  return true;
}

void look_at_any(FoundLayers& found, const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  using namespace torch::nn;  // NOLINT
  look_at<BatchNorm1dImpl>(found, name, module) || look_at<BatchNorm2dImpl>(found, name, module) ||
      look_at<BatchNorm3dImpl>(found, name, module);
}

/// Ranks whose modules differ would wait for each other in the first forward, or train other things.
void check_same_number(const FoundLayers& found, const Group& group) {
  const auto mine = static_cast<int64_t>(found.layers.size());
  const at::Tensor all = group.all_gather(at::full({1}, mine, at::kLong));
  for (int rank = 0; rank < group.world_size(); ++rank)
    if (const auto others = all[rank].item<int64_t>(); others != all[0].item<int64_t>())
      throw Error("convert_sync_batchnorm: the module of rank " + std::to_string(rank) + " has " +
                  std::to_string(others) + " batch norms, that of rank 0 has " +
                  std::to_string(all[0].item<int64_t>()) + "; all ranks must convert the same module");
}

int64_t convert(const FoundLayers& found, const Group& group) {
  check_same_number(found, group);
  TORCH_CHECK(found.problems.empty(),
              "convert_sync_batchnorm: nothing was converted, because for some layers the conversion would have no "
              "effect or an unknown one:",
              found.problems);
  if (found.layers.empty()) {
    if (group.rank() == 0)
      TORCH_WARN("convert_sync_batchnorm: the module has no BatchNorm1d, 2d or 3d, so there was nothing to do");
    return 0;
  }
  const auto exchange = StatisticsExchange::of(group);
  for (const FoundLayer& layer : found.layers) {
    if (group.world_size() == 1) break;  // this rank's batch is the whole batch
    const at::Tensor& known = layer.running_mean.defined() ? layer.running_mean : layer.weight;
    exchange->expect(known.numel());
    for (const at::Tensor& tensor : {layer.running_mean, layer.weight})
      if (tensor.defined()) synchronize_calls_with(tensor, {exchange, layer.is_training});
  }
  return static_cast<int64_t>(found.layers.size());
}

/// A pointer to a module that is itself a layer; it has no owner that the conversion could ask for one.
std::shared_ptr<torch::nn::Module> itself(torch::nn::Module& module) {
  return module.modules(/*include_self=*/true).front();
}

}  // namespace

void FoundLayers::add(const std::string& name, FoundLayer layer) {
  if (layer.running_mean.defined() || layer.weight.defined())
    layers.push_back(std::move(layer));
  else
    problems += "\n  " + name +
                " has neither parameters nor running statistics to recognise it by; use a lockstep::SyncBatchNorm "
                "instead";
}

int64_t convert_sync_batchnorm(torch::nn::Module& module, const Group& group) {
  FoundLayers found;
  const auto children = module.named_modules("", /*include_self=*/false);
  for (const auto& item : children) look_at_any(found, item.key(), item.value());
  if (children.is_empty()) look_at_any(found, "the module", itself(module));
  return convert(found, group);
}

int64_t convert_sync_batchnorm(const torch::jit::Module& module, const Group& group) {
  const int64_t converted = convert(find_layers(module), group);
  if (group.world_size() > 1) run_as_written(module);
  return converted;
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
  exchange_->expect(options.num_features());
  for (const at::Tensor& tensor : {running_mean, weight})
    if (tensor.defined()) synchronize_calls_with(tensor, {exchange_, nullptr});
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::SyncBatchNorm(" << options.num_features() << ", ranks=" << exchange_->group.world_size() << ")";
}

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 2, "SyncBatchNorm: the input must be [batch, channels, ...], not ", input.sizes());
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
