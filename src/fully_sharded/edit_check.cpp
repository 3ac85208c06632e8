#include "fully_sharded/edit_check.h"

#include <unordered_set>
#include <utility>

#include "fully_sharded/part_gradients.h"

namespace lockstep::fully_sharded {
namespace {

/// Begins a line of Walk::lines that describes an edit of the module.
constexpr std::string_view kEdited = "edited: ";

}  // namespace

EditCheck::EditCheck(std::shared_ptr<torch::nn::Module> module, std::deque<Unit>& units, int model)
    : module_(std::move(module)), units_(units), model_(model) {
  std::vector<at::Tensor> all;
  for (Unit& unit : units_)
    for (Unit::Parameter& parameter : unit.parameters()) {
      parameters_.emplace(parameter.tensor.unsafeGetTensorImpl(), &parameter);
      all.push_back(parameter.tensor);
    }
  claim_.emplace(std::move(all));
}

std::vector<Unit::Parameter*> EditCheck::trained() const {
  std::vector<Unit::Parameter*> all;
  std::unordered_set<const Unit::Parameter*> seen;
  for (const auto& item : module_->named_parameters())
    if (item.value().defined() && item.value().requires_grad())
      if (Unit::Parameter* parameter = &parameter_of(item.value()); seen.insert(parameter).second)
        all.push_back(parameter);
  return all;
}

Unit::Parameter& EditCheck::parameter_of(const at::Tensor& tensor) const {
  const auto found = parameters_.find(tensor.unsafeGetTensorImpl());
  TORCH_CHECK(found != parameters_.end(), "FullyShardedDataParallel: a parameter of ", tensor.sizes(),
              " was not in the module when this object was made; layers cannot be added or replaced");
  return *found->second;
}

void EditCheck::check_unchanged() const {
  for (const Unit& unit : units_) {
    const std::string name = unit.changed();
    TORCH_CHECK(name.empty(), "FullyShardedDataParallel: ", name,
                " was changed by something other than the optimizer that steps the parts, or moved to other memory, so "
                "the other ranks' parts no longer match; set parameters with this model's load_state_dict()");
  }
}

void EditCheck::check_module() {
  check_unchanged();
  walk_ = walk_through();
  const std::string& lines = walk_.lines;
  const size_t edit = lines.find(kEdited);
  TORCH_CHECK(edit == std::string::npos,
              "FullyShardedDataParallel: the module has been edited since it was made: it has ",
              lines.substr(edit + kEdited.size(), lines.find('\n', edit) - edit - kEdited.size()),
              ". Layers and parameters cannot be added or replaced");
}

EditCheck::Walk EditCheck::walk_through() const {
  Walk walk{.lines = "model " + std::to_string(model_) + " of those that were made\n", .trained = {}};
  std::unordered_set<const c10::TensorImpl*> known;
  for (const auto& item : module_->named_parameters()) {
    if (!item.value().defined()) continue;
    const auto found = parameters_.find(item.value().unsafeGetTensorImpl());
    if (found == parameters_.end())
      walk.lines += std::string(kEdited) + "a new parameter, " + item.key() + '\n';
    else if (known.insert(found->first).second && item.value().requires_grad())
      walk.trained.push_back(found->second);
    if (!item.value().requires_grad()) walk.lines += "frozen " + item.key() + '\n';
  }
  if (known.size() < parameters_.size())
    walk.lines += std::string(kEdited) + "only " + std::to_string(known.size()) + " of the parameters that it had\n";
  return walk;
}

std::string EditCheck::trouble_of_gradients(const std::string& call) const {
  const std::string changed = changes_of_gradients(units_).changed;
  if (changed.empty()) return "";
  return "FullyShardedDataParallel: the gradient of " + changed + " was changed between a backward and " + call +
         " by something other than model.clip_grad_norm() or a GradScaler. Each rank has only parts of the gradients, "
         "whose norm is not that of the model: limit gradients by model.clip_grad_norm() alone";
}

std::string EditCheck::trouble_of_unstepped() const {
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters())
      if (parameter.part.grad().defined() && !parameter.stepped)
        return "FullyShardedDataParallel: " + parameter.name +
               " has a gradient, but was frozen when the optimizer was made, so nothing steps it; make another "
               "optimizer after you unfreeze parameters";
  return "";
}

}  // namespace lockstep::fully_sharded
