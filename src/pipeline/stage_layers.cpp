#include "pipeline/stage_layers.h"

#include <algorithm>
#include <map>
#include <sstream>
#include <utility>

#include <c10/core/Storage.h>

#include <lockstep/error.h>

#include "base/rank_names.h"
#include "collectives/coalesced.h"
#include "data_parallel/same_model.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

/// The memory of layers' tensors, remembered after a layer is gone.
class Owners {
 public:
  /// TORCH_CHECK fails if another stage has the tensor.
  void add(const std::string& name, const at::Tensor& tensor, int stage) {
    if (tensor.numel() == 0) return;
    const at::Storage& storage = tensor.storage();
    const auto [place, is_new] =
        owners_.try_emplace(storage.unsafeGetStorageImpl(), Owner{storage.getWeakStorageImpl(), name, stage});
    const Owner& owner = place->second;
    TORCH_CHECK(is_new || owner.stage == stage, "Pipeline: ", owner.name, " of stage ", owner.stage, " and ", name,
                " of stage ", stage,
                " lie in the same memory, and would be trained separately; give each its own, or cut the sequence so "
                "that one stage has both");
  }

 private:
  struct Owner {
    c10::weak_intrusive_ptr<c10::StorageImpl> keeps_the_address;
    std::string name;
    int stage;
  };
  std::map<const c10::StorageImpl*, Owner> owners_;
};

int stage_of(size_t layer, size_t layers, const PipelineOptions& options) {
  if (options.cuts.empty()) {
    // The first layer of stage s is ceil(s * layers / stages).
    return static_cast<int>(layer * static_cast<size_t>(options.stages) / layers);
  }
  return static_cast<int>(std::upper_bound(options.cuts.begin(), options.cuts.end(), layer) - options.cuts.begin());
}

NamedTensors with_prefix(const std::string& name, const torch::nn::Module& layer) {
  NamedTensors tensors;
  for (auto& [own_name, tensor] : tensors_of(layer)) tensors.emplace_back(name + '.' + own_name, tensor);
  return tensors;
}

}  // namespace

std::vector<NamedMaker> makers_of(const torch::nn::Sequential& layers) {
  TORCH_CHECK(!layers.is_empty(), "Pipeline: the sequence is null");
  std::vector<NamedMaker> makers;
  const auto names = layers->named_children().keys();
  size_t i = 0;
  for (auto layer = layers->begin(); layer != layers->end(); ++layer, ++i)
    makers.push_back({names.at(i), [any = *layer] { return any; }, /*is_there=*/true});
  return makers;
}

NamedTensors tensors_of(const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& item : module.named_parameters())
    if (item.value().defined()) tensors.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) tensors.emplace_back(item.key(), item.value());
  return tensors;
}

StageLayers make_stage(const std::vector<NamedMaker>& layers, const Group& group, const PipelineOptions& options,
                       int stage) {
  const OperationLabel label("the layers of a Pipeline");
  StageLayers result;
  Owners owners;
  std::vector<bool> trains(static_cast<size_t>(options.stages), false);
  for (size_t i = 0; i < layers.size(); ++i) {
    const int here = stage_of(i, layers.size(), options);
    torch::nn::AnyModule layer;
    NamedTensors tensors;
    std::string trouble;
    try {
      layer = layers[i].make();
      TORCH_CHECK(!layer.is_empty(), "Pipeline: the function of layer ", layers[i].name, " returned no layer");
      tensors = with_prefix(layers[i].name, *layer.ptr());
      for (const auto& [name, tensor] : tensors) owners.add(name, tensor, here);
    } catch (const c10::Error& error) {
      trouble = error.what_without_backtrace();
    }
    const auto troubles = group.all_gather_bytes(trouble);
    for (const std::string& one : troubles)
      if (!one.empty()) throw Error(ranks_with(troubles, one) + ": " + one);
    std::ostringstream described;
    described << *layer.ptr();
    check_same_on_all_ranks(group, "layer", layers[i].name + ": " + described.str());
    check_same_on_all_ranks(group, "parameter", tensors, [](const at::Tensor&) { return std::string(); });
    const auto of_layer = layer.ptr()->named_buffers();
    std::vector<at::Tensor> values;
    for (const auto& [name, tensor] : tensors) {
      values.push_back(tensor);
      result.all.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), here,
                            of_layer.contains(name.substr(layers[i].name.size() + 1))});
      if (tensor.requires_grad()) trains[static_cast<size_t>(here)] = true;
    }
    if (!values.empty()) broadcast_weights(group, values, /*root=*/0);
    if (here == stage) {
      result.own->push_back(layers[i].name, std::move(layer));
    } else if (layers[i].is_there) {  // no stage would train its parameters
      for (at::Tensor& value : values) value.set_data(at::empty({0}, value.options()));
    }
  }
  std::stable_partition(result.all.begin(), result.all.end(), [](const auto& known) { return !known.is_buffer; });
  const auto idle = std::find(trains.begin(), trains.end(), false);
  TORCH_CHECK(idle == trains.end(), "Pipeline: stage ", idle - trains.begin(),
              " has no parameter to train; cut the sequence so that each stage has some");
  return result;
}

}  // namespace lockstep
