#include "fully_sharded/part_states.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "checkpoint/master_state.h"
#include "checkpoint/sliced_memory.h"
#include "data_parallel/tensor_memory.h"
#include "optim/local_step.h"
#include "optim/step_plan.h"

namespace lockstep::fully_sharded {
namespace {

constexpr int kArrays = 3;  // the most that a formula has
/// The most bytes that exist both in the old and in the new place.
constexpr size_t kMovedBytes = 64 << 20;

/// The elements in the memory order of a tensor with these strides.
at::Tensor in_memory_order(const at::Tensor& tensor, at::IntArrayRef strides) {
  at::Tensor laid_out = tensor;
  if (tensor.strides() != strides)
    laid_out = at::empty_strided(tensor.sizes(), strides, tensor.options()).copy_(tensor);
  return laid_out.as_strided({tensor.numel()}, {1});
}

}  // namespace

template <typename Body>
void PartStates::for_each(torch::optim::Optimizer& optimizer, const Body& body) const {
  const at::NoGradGuard no_grad;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& part : group.params()) {
      const auto state = optimizer.state().find(part.unsafeGetTensorImpl());
      if (state == optimizer.state().end()) continue;
      for (int array = 0; array < kArrays; ++array)
        if (const at::Tensor tensor = formula_.array(*state->second, array); tensor.defined())
          formula_.set_array(*state->second, array, body(tensor, part, array));
      if (auto* const kept = dynamic_cast<Master*>(state->second.get());
          kept != nullptr && kept->master_param.defined())
        kept->master_param = body(kept->master_param, part, detail::kMasterArray);
    }
}

at::Tensor PartStates::flat(const at::Tensor& array, const at::Tensor& part) const {
  const PartPlace& place = place_of(part);
  if (slices_of(array.storage()) != nullptr) {
    const int64_t begin = place.begin < place.end ? place.offset + place.begin : 0;
    return array.as_strided({place.end - place.begin}, {1}, begin);
  }
  if (array.sizes() == part.sizes() && array.is_contiguous()) return array;
  return in_memory_order(array, place.strides).slice(0, place.begin, place.end).clone();
}

std::pair<int64_t, int64_t> PartStates::elements_to_load(const at::Tensor& part, const at::Tensor& array) const {
  const PartPlace& place = place_of(part);
  if (array.strides() != place.strides) return {0, array.numel()};  // they are put into order first
  return {place.begin, std::max(place.begin, place.end)};
}

at::Tensor PartStates::own_place(const at::Tensor& part, int array, at::ScalarType dtype) {
  const PartPlace& place = place_of(part);
  const int64_t begin = place.begin < place.end ? place.offset + place.begin : 0;
  return memory(place, array, dtype).as_strided({place.end - place.begin}, {1}, begin);
}

void PartStates::reserve(const torch::optim::Optimizer& optimizer) {
  if (folder_.empty()) return;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& part : group.params()) {
      if (!part.grad().defined() && optimizer.state().count(part.unsafeGetTensorImpl()) == 0) continue;
      const bool master = masters_ && optim::is_16_bit(part.scalar_type());
      if (master) memory(place_of(part), detail::kMasterArray, at::kFloat);
      for (int array = 0; array < optim::state_arrays(formula_.algorithm(group.options())); ++array)
        memory(place_of(part), array, master ? at::kFloat : part.scalar_type());
    }
}

at::Tensor PartStates::zeros(const at::Tensor& part, int array, at::ScalarType dtype) {
  return folder_.empty() ? at::zeros(part.sizes(), part.options().dtype(dtype).requires_grad(false))
                         : own_place(part, array, dtype).zero_();
}

void PartStates::flatten(torch::optim::Optimizer& optimizer) {
  for_each(optimizer, [&](const at::Tensor& array, const at::Tensor& part, int number) {
    at::Tensor found = flat(array, part);
    if (folder_.empty() || slices_of(found.storage()) != nullptr) return found;
    return own_place(part, number, array.scalar_type()).copy_(found);
  });
}

void PartStates::show(torch::optim::Optimizer& optimizer) {
  size_t moved = 0;
  bool any = false;
  for_each(optimizer, [&](const at::Tensor& array, const at::Tensor& part, int number) {
    if (moved >= kMovedBytes) TensorMemory::release(), moved = 0;
    const PartPlace& place = place_of(part);
    const at::Tensor& whole = memory(place, number, array.scalar_type());
    if (array.storage().unsafeGetStorageImpl() != whole.storage().unsafeGetStorageImpl() && place.begin < place.end) {
      whole.narrow(0, place.offset + place.begin, place.end - place.begin).copy_(flat(array, part));
      moved += static_cast<size_t>(place.end - place.begin) * whole.itemsize();
      any = true;
    }
    return whole.as_strided(place.sizes, place.strides, place.offset);
  });
  if (any) TensorMemory::release();
}

const at::Tensor& PartStates::memory(const PartPlace& place, int array, at::ScalarType dtype) {
  at::Tensor& memory = memory_[{place.unit, array}];
  if (!memory.defined() || memory.scalar_type() != dtype)
    memory = groups_->allocate_in_slices(place.slice_elements, dtype, folder_);
  return memory;
}

}  // namespace lockstep::fully_sharded
