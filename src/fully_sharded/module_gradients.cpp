#include "fully_sharded/module_gradients.h"

#include <ATen/ATen.h>

#include "fully_sharded/storage_access.h"

namespace lockstep::fully_sharded {
namespace {

at::Tensor closed_gradient(const Unit::Parameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  const c10::Storage storage = empty_storage(tensor.numel() * static_cast<int64_t>(tensor.itemsize()));
  const at::Tensor closed =
      at::empty({0}, tensor.options().requires_grad(false)).set_(storage, 0, tensor.sizes(), tensor.strides());
  storage.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "FullyShardedDataParallel: the gradient of " + parameter.name +
      " is not in the module, but in the parts that the optimizer steps; limit gradients by the model's "
      "clip_grad_norm(), and clear them by the optimizer's zero_grad()");
  return closed;
}

/// An alias of it counts, too.
bool is_closed(const Unit::Parameter& parameter, const at::Tensor& gradient) {
  return parameter.closed_gradient.defined() && gradient.has_storage() &&
         gradient.storage().unsafeGetStorageImpl() == parameter.closed_gradient.storage().unsafeGetStorageImpl();
}

}  // namespace

std::string settle_gradients(std::deque<Unit>& units) {
  for (Unit& unit : units)
    for (Unit::Parameter& parameter : unit.parameters()) {
      const at::Tensor gradient = parameter.tensor.grad();
      if (!gradient.defined()) {
        if (parameter.shows_gradient) parameter.part.mutable_grad().reset();
        parameter.shows_gradient = false;
      } else if (!is_closed(parameter, gradient)) {
        return "FullyShardedDataParallel: the .grad of " + parameter.name +
               " was set by something other than a backward, and nothing reads it there: gradients are in the parts "
               "that the optimizer steps. Do not set the module's .grad";
      } else if (!parameter.part.grad().defined()) {
        parameter.tensor.mutable_grad().reset();
        parameter.shows_gradient = false;
      }
    }
  return "";
}

void hide_gradients(std::deque<Unit>& units) {
  for (Unit& unit : units)
    for (Unit::Parameter& parameter : unit.parameters())
      if (std::exchange(parameter.shows_gradient, false)) parameter.tensor.mutable_grad().reset();
}

void show_gradients(std::deque<Unit>& units) {
  for (Unit& unit : units)
    for (Unit::Parameter& parameter : unit.parameters()) {
      if (!parameter.part.grad().defined()) continue;
      if (!parameter.closed_gradient.defined()) parameter.closed_gradient = closed_gradient(parameter);
      parameter.tensor.mutable_grad() = parameter.closed_gradient;
      parameter.shows_gradient = true;
    }
}

}  // namespace lockstep::fully_sharded
