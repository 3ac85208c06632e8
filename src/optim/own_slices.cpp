#include "optim/own_slices.h"

#include <bit>
#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <torch/serialize/output-archive.h>

#include "base/hash.h"
#include "collectives/shm/kernels/stream_copy.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

uint64_t mixed_with(uint64_t hash, const c10::IValue& value) {
  if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) hash = mixed_with(hash, item);
    return hash;
  }
  const double number = value.isBool() ? value.toBool() : number_of(value);
  uint64_t word;
  std::memcpy(&word, &number, sizeof word);
  return Hash::mixed(hash, word);
}

/// A hash of an unknown optimizer's options, as far as they describe themselves. `all`: not only the rate.
uint64_t hash_of_options(const torch::optim::OptimizerOptions& options, bool all) {
  uint64_t hash = Hash::kStart;
  const auto add = [&](const auto& tell) {
    try {
      tell();
    } catch (const c10::Error&) {  // the class of the options does not implement it
    }
  };
  add([&] { hash = Hash::mixed(hash, std::bit_cast<uint64_t>(options.get_lr())); });
  if (all)
    add([&] {
      torch::serialize::OutputArchive archive;
      options.serialize(archive);
      archive.save_to([&](const void* bytes, size_t size) {
        for (size_t i = 0; i < size; ++i) hash = Hash::mixed(hash, static_cast<const unsigned char*>(bytes)[i]);
        return size;
      });
    });
  return hash;
}

}  // namespace

at::Tensor flat_part(const at::Tensor& tensor, const at::Tensor& parameter, int64_t begin, int64_t count) {
  return optim::laid_out(tensor, tensor.scalar_type(), parameter)
      .as_strided({parameter.numel()}, {1})
      .narrow(0, begin, count);
}

/// While it lives, the groups of an optimizer hold slices.
class OwnSlices::Exchanged {
 public:
  Exchanged(torch::optim::Optimizer& optimizer, const OwnSlices& step) : optimizer_(optimizer) {
    for (auto& group : optimizer.param_groups()) {
      std::vector<at::Tensor> slices;
      for (const at::Tensor& tensor : group.params()) {
        const Slice& slice = step.slices_[step.areas_.place_of(tensor)];
        // An empty slice reveals the kind of a parameter's state. An optimizer that may do anything with it gets none.
        if (slice.is_stepped && (step.kind_ || slice.tensor.numel() > 0)) slices.push_back(slice.tensor);
      }
      whole_.push_back(std::exchange(group.params(), std::move(slices)));
    }
  }
  ~Exchanged() {
    for (size_t i = 0; i < whole_.size(); ++i) {
      for (at::Tensor& slice : optimizer_.param_groups()[i].params()) slice.mutable_grad().reset();
      optimizer_.param_groups()[i].params() = std::move(whole_[i]);
    }
  }
  Exchanged(const Exchanged&) = delete;

 private:
  torch::optim::Optimizer& optimizer_;
  std::vector<std::vector<at::Tensor>> whole_;
};

OwnSlices::OwnSlices(Areas& areas, std::optional<OptimizerKind> kind, void (*own_step)(torch::optim::Optimizer&))
    : areas_(areas), kind_(std::move(kind)), own_step_(own_step) {
  for (const Areas::Parameter& parameter : areas_.parameters())
    slices_.push_back({.tensor = areas_.mine(areas_.area_of(parameter).parameters, parameter)});
}

SliceStepper::Outlook OwnSlices::prepare(const torch::optim::Optimizer& optimizer, const StepGradients& gradients) {
  // Writing options as text takes a fraction of a millisecond.
  constexpr int64_t kAllOptionsEvery = 16;
  Outlook outlook{.parameters = {}, .hash = Hash::kStart};
  uint64_t& hash = outlook.hash;
  for (const auto& group : optimizer.param_groups()) {
    hash = Hash::mixed(hash, group.params().size());
    if (!kind_ && group.has_options())
      hash = Hash::mixed(hash, hash_of_options(group.options(), runs_ % kAllOptionsEvery == 0));
    for (const OptimizerOption& option : kind_ ? kind_->options : std::vector<OptimizerOption>{})
      hash = mixed_with(hash, option.get(group.options()));
    for (const at::Tensor& tensor : group.params()) {
      if (!gradients.has(tensor)) continue;
      outlook.parameters.push_back(tensor);
      hash = Hash::mixed(hash, areas_.place_of(tensor));
      const auto found = optimizer.state().find(tensor.unsafeGetTensorImpl());
      if (!kind_ || found == optimizer.state().end()) continue;
      for (const OptimizerField& field : kind_->fields) {
        const at::Tensor value = field.get(*found->second);
        hash = field.is_scalar ? mixed_with(hash, value) : Hash::mixed(hash, value.defined() ? 1 : 0);
      }
    }
  }
  return outlook;
}

void OwnSlices::bring_state(torch::optim::Optimizer& optimizer, size_t place) {
  const Areas::Parameter& parameter = areas_.parameters()[place];
  const auto found = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  auto state = found->second->clone();
  for (const OptimizerField& field : kind_->fields) {
    if (field.is_scalar) continue;
    const at::Tensor held = field.get(*state);
    if (!held.defined()) continue;
    const at::Tensor mine = areas_.mine(areas_.array(parameter, field.name, held.scalar_type()), parameter);
    // Loaded, or made by the optimizer's constructor: this rank copies its slice, which is all that it will read.
    if (!held.is_alias_of(mine)) mine.copy_(flat_part(held, parameter.tensor, parameter.begin, mine.numel()));
    field.set(*state, mine);
  }
  optimizer.state()[slices_[place].tensor.unsafeGetTensorImpl()] = std::move(state);
}

void OwnSlices::take_state(torch::optim::Optimizer& optimizer, size_t place) {
  const Areas::Parameter& parameter = areas_.parameters()[place];
  const auto found = optimizer.state().find(slices_[place].tensor.unsafeGetTensorImpl());
  if (found == optimizer.state().end()) return;
  auto state = std::move(found->second);
  optimizer.state().erase(found);
  for (const OptimizerField& field : kind_->fields) {
    if (field.is_scalar) continue;
    const at::Tensor held = field.get(*state);
    if (!held.defined()) continue;
    const at::Tensor& array = areas_.array(parameter, field.name, held.scalar_type());
    const at::Tensor mine = areas_.mine(array, parameter);
    if (!held.is_alias_of(mine)) mine.copy_(held);
    field.set(*state, areas_.on_device() ? mine : Areas::view(array, parameter));
  }
  optimizer.state()[parameter.tensor.unsafeGetTensorImpl()] = std::move(state);
}

int64_t OwnSlices::run(torch::optim::Optimizer& optimizer, const StepGradients& gradients) {
  ++runs_;
  // Whole tensors of parameters that are not stepped would remain.
  const bool was_complete = std::exchange(is_complete_, false);
  const auto changes = [&](const Slice& slice) { return kind_ && (slice.is_stepped || was_complete); };
  for (size_t place = 0; place < slices_.size(); ++place) {
    Slice& slice = slices_[place];
    slice.tensor.mutable_grad() = gradients.slice_of(areas_.parameters()[place]);
    slice.is_stepped = slice.tensor.grad().defined();
    if (changes(slice)) bring_state(optimizer, place);
  }
  {
    const Exchanged exchanged(optimizer, *this);
    own_step_(optimizer);
  }
  for (size_t place = 0; place < slices_.size(); ++place)
    if (changes(slices_[place])) take_state(optimizer, place);
  copy_to_others();
  return 0;
}

void OwnSlices::copy_to_others() const {
  if (areas_.memory() == nullptr) return;
  for (size_t place = 0; place < slices_.size(); ++place) {
    if (!slices_[place].is_stepped) continue;
    const Areas::Parameter& parameter = areas_.parameters()[place];
    const at::Tensor& slice = slices_[place].tensor;
    const size_t at = static_cast<size_t>(parameter.offset + parameter.begin) * slice.element_size();
    for (std::byte* other : areas_.area_of(parameter).others)
      shm::stream_copy(other + at, static_cast<const std::byte*>(slice.const_data_ptr()), slice.nbytes());
  }
}

void OwnSlices::check_state_is_known() const {
  TORCH_CHECK(kind_.has_value(),
              "ZeroRedundancyOptimizer: the state of this class of optimizer can be neither saved nor loaded, because "
              "it belongs to the slices of each rank and only the class knows its meaning. Use SGD, Adam, AdamW, "
              "RMSprop or Adagrad, or let each rank step its own copy with an optimizer made from the parameters");
}

void OwnSlices::complete(torch::optim::Optimizer& optimizer) {
  check_state_is_known();
  if (!areas_.on_device()) return areas_.complete();
  if (is_complete_) return;
  const OperationLabel label("the state of a ZeroRedundancyOptimizer, to be saved");
  for (const Areas::Area& area : areas_.areas())
    for (const auto& [name, array] : area.arrays) {
      const at::Tensor whole = areas_.whole(array, area);
      for (const Areas::Parameter& parameter : areas_.parameters()) {
        const auto found = optimizer.state().find(parameter.tensor.unsafeGetTensorImpl());
        if (&areas_.area_of(parameter) != &area || found == optimizer.state().end()) continue;
        for (const OptimizerField& field : kind_->fields) {
          if (field.is_scalar || field.name != name) continue;
          const at::Tensor held = field.get(*found->second);
          // State loaded since the last step is whole.
          if (held.defined() && held.is_alias_of(array)) field.set(*found->second, Areas::view(whole, parameter));
        }
      }
    }
  is_complete_ = true;
}

}  // namespace lockstep::detail
