#include <lockstep/sync_batch_norm.h>

#include <algorithm>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/jit/api/module.h>

#include <lockstep/error.h>

#include "base/text.h"
#include "nn/batch_norm_operator.h"
#include "nn/batch_statistics.h"
#include "nn/found_layers.h"
#include "nn/statistics_exchange.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

constexpr const char* kItself = "the module";  ///< the name of a layer that is the whole module

template <typename Layer>
bool look_at(FoundLayers& found, const std::string& name, const std::shared_ptr<torch::nn::Module>& module) {
  const auto layer = std::dynamic_pointer_cast<Layer>(module);
  if (!layer) return false;
  const torch::nn::Module& object = *layer;
  if (typeid(object) != typeid(Layer)) {
    found.problems += "\n  " + name +
                      " is of a class derived from BatchNorm, whose forward is unknown; derive it from "
                      "lockstep::SyncBatchNorm, or hold one as a member";
    return true;
  }
  found.add({name, layer->running_mean, layer->weight, [weak = std::weak_ptr<torch::nn::Module>(module)] {
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

std::string described(const FoundLayer& layer) {
  return "`" + layer.name + "` of " + std::to_string(layer.known().numel()) + " channels";
}

/// Ranks with different modules would wait for each other in the first forward, or train different things.
void check_same_layers(const FoundLayers& found, const Group& group) {
  if (group.world_size() == 1) return;
  const OperationLabel label("convert_sync_batchnorm()");
  std::string lines;
  for (const FoundLayer& layer : found.layers) lines += described(layer) + '\n';
  const std::vector<std::string> all = group.all_gather_bytes(lines);
  const std::vector<std::string> first = lines_of(all.front());
  for (size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all.front()) continue;
    const std::vector<std::string> other = lines_of(all[rank]);
    if (other.size() != first.size())
      throw Error("convert_sync_batchnorm: the module of rank " + std::to_string(rank) + " has " +
                  std::to_string(other.size()) + " batch norms, and that of rank 0 has " +
                  std::to_string(first.size()) + "; all ranks must convert the same module");
    const auto [mine, theirs] = std::mismatch(first.begin(), first.end(), other.begin());
    throw Error("convert_sync_batchnorm: batch norm " + std::to_string(mine - first.begin()) +
                " of the module of rank " + std::to_string(rank) + " is " + *theirs + ", and that of rank 0 is " +
                *mine + "; all ranks must convert the same module");
  }
}

int64_t convert(const FoundLayers& found, const Group& group) {
  check_same_layers(found, group);
  TORCH_CHECK(found.problems.empty(),
              "convert_sync_batchnorm: nothing was converted, because for some layers the conversion would have no "
              "effect or an unknown one:",
              found.problems);
  if (found.layers.empty()) {
    if (group.rank() == 0)
      TORCH_WARN(
          "convert_sync_batchnorm: the module has no BatchNorm1d, BatchNorm2d or BatchNorm3d, so nothing was "
          "converted");
    return 0;
  }
  const auto exchange = StatisticsExchange::of(group);
  for (const FoundLayer& layer : found.layers) {
    if (group.world_size() == 1) break;  // this rank's batch is the whole batch
    const auto own = std::make_shared<LayerExchange>(
        exchange, layer.name == kItself ? "the batch norm" : "batch norm `" + layer.name + "`", layer.known().numel());
    for (const at::Tensor& tensor : {layer.running_mean, layer.weight})
      if (tensor.defined()) synchronize_calls_with(tensor, {own, layer.is_training});
  }
  return static_cast<int64_t>(found.layers.size());
}

/// A pointer to a module that is itself a layer, and so has no owner from which to get one.
std::shared_ptr<torch::nn::Module> itself(torch::nn::Module& module) {
  return module.modules(/*include_self=*/true).front();
}

}  // namespace

void FoundLayers::add(FoundLayer layer) {
  if (layer.known().defined())
    layers.push_back(std::move(layer));
  else
    problems +=
        "\n  " + layer.name +
        " has neither parameters nor running statistics by which it could be found; use a lockstep::SyncBatchNorm "
        "instead";
}

int64_t convert_sync_batchnorm(torch::nn::Module& module, const Group& group) {
  FoundLayers found;
  const auto children = module.named_modules("", /*include_self=*/false);
  for (const auto& item : children) look_at_any(found, item.key(), item.value());
  if (children.is_empty()) look_at_any(found, kItself, itself(module));
  return convert(found, group);
}

int64_t convert_sync_batchnorm(const torch::jit::Module& module, const Group& group) {
  const int64_t converted = convert(find_layers(module), group);
  if (group.world_size() > 1) run_as_written(module);
  return converted;
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& like, const Group& group)
    : NormImplBase(like),
      exchange_(std::make_shared<LayerExchange>(StatisticsExchange::of(group), "", like.num_features())) {
  remember();
}

void SyncBatchNormImpl::reset() {
  NormImplBase::reset();
  remember();
}

void SyncBatchNormImpl::remember() {
  if (exchange_->world_size() == 1) return;
  for (const at::Tensor& tensor : {running_mean, weight})
    if (tensor.defined()) synchronize_calls_with(tensor, {exchange_, nullptr});
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << "lockstep::SyncBatchNorm(" << options.num_features() << ", ranks=" << exchange_->world_size() << ")";
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
  if (is_training() && exchange_->world_size() > 1)
    return sync_batch_norm(input, {weight, bias, running_mean, running_var, momentum, options.eps()}, exchange_);
  return torch::nn::functional::detail::batch_norm(input, running_mean, running_var, weight, bias,
                                                   is_training() || !options.track_running_stats(), momentum,
                                                   options.eps());
}

}  // namespace lockstep
