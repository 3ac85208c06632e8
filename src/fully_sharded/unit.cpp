#include "fully_sharded/unit.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "fully_sharded/storage_access.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_marks.h"

namespace lockstep::fully_sharded {
namespace {

c10::DataPtr borrowed(void* memory) { return {memory, at::kCPU}; }

}  // namespace

Unit::Unit(std::string name, const NamedTensors& parameters, const MachineGroups& groups, bool stays_gathered)
    : name_(std::move(name)), groups_(groups), dtype_(parameters.front().second.scalar_type()) {
  const at::NoGradGuard no_grad;
  std::vector<int64_t> elements;
  for (const auto& [parameter, tensor] : parameters) elements.push_back(tensor.numel());
  layout_ = UnitLayout::of(elements, groups_.all().world_size());
  if (stays_gathered) whole_ = groups_.allocate_together(this->elements(), dtype_);
  if (!stays_gathered) in_slices_ = groups_.allocate_in_slices(layout_.slice, dtype_);
  slice_ = memory().narrow(0, groups_.slice() * layout_.slice, layout_.slice);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [full_name, tensor] = parameters[i];
    Parameter one{.name = full_name, .tensor = tensor, .offset = layout_.offsets[i]};
    std::tie(one.begin, one.end) = layout_.part_of(one.offset, tensor.numel(), groups_.slice());
    const int64_t first = one.begin < one.end ? one.offset + one.begin - groups_.slice() * layout_.slice : 0;
    // Not a view, whose version would be shared by all parts.
    one.part =
        at::empty({0}, slice_.options())
            .set_(slice_.storage(), slice_.storage_offset() + first, {std::max<int64_t>(0, one.end - one.begin)}, {1});
    one.part.set_requires_grad(tensor.requires_grad());
    parameters_.push_back(std::move(one));
  }
  {
    const OperationLabel label("the parameters of a unit");
    const at::Tensor initial = at::zeros({this->elements()}, dtype_);
    if (groups_.all().rank() == 0)
      for (const Parameter& parameter : parameters_) view(initial, parameter).copy_(parameter.tensor);
    groups_.all().broadcast(initial);
    set_from(initial);
  }
  if (!stays_gathered) storage_ = empty_storage(bytes());
  move_parameters_to(stays_gathered ? whole_.storage() : storage_);
  if (!stays_gathered) close();
  remember();
}

void Unit::move_parameters_to(const c10::Storage& storage) {
  for (const Parameter& parameter : parameters_)
    at::Tensor(parameter.tensor).set_(storage, parameter.offset, parameter.tensor.sizes(), parameter.tensor.strides());
}

void Unit::withhold() {
  const at::NoGradGuard no_grad;
  storage_ = empty_storage(bytes());
  move_parameters_to(storage_);
  close();
}

void Unit::rename(const std::string& name, const NamedTensors& parameters) {
  name_ = name;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].name = parameters[i].first;
  if (!stays_gathered()) return close();
  const at::NoGradGuard no_grad;
  allow_access(*storage_.unsafeGetStorageImpl());
  move_parameters_to(whole_.storage());
  remember();
}

Unit::~Unit() {
  if (parameters_.empty()) return;
  const at::NoGradGuard no_grad;
  if (!stays_gathered()) {
    close_with(
        "was destroyed with the FullyShardedDataParallel that held it once over all machines; call its state_dict() "
        "before you destroy it");
    return;
  }
  for (const Parameter& parameter : parameters_) {
    if (parameter.tensor.storage().unsafeGetStorageImpl() != whole_.storage().unsafeGetStorageImpl()) continue;
    try {
      at::Tensor(parameter.tensor).set_(parameter.tensor.clone());
    } catch (const std::exception&) {  // no memory: it stays in place, which keeps the unit's memory alive
    }
  }
}

void Unit::set_from(const at::Tensor& memory) {
  if (stays_gathered()) {
    piece_of(whole_).copy_(piece_of(memory));
    groups_.wait_for_machine();
  } else {
    slice_.copy_(memory.narrow(0, groups_.slice() * layout_.slice, layout_.slice));
  }
}

at::Tensor Unit::piece_of(const at::Tensor& memory) const {
  const int64_t piece = layout_.slice * groups_.machines();
  return memory.narrow(0, groups_.rank_here() * piece, piece);
}

at::Tensor Unit::view(const at::Tensor& memory, const Parameter& parameter) {
  return memory.as_strided(parameter.tensor.sizes(), parameter.tensor.strides(),
                           memory.storage_offset() + parameter.offset);
}

void Unit::open(const at::Tensor& memory) {
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  allow_access(*storage);
  storage->set_data_ptr_noswap(borrowed(memory.mutable_data_ptr()));
}

void Unit::close() {
  close_with("is not gathered: each machine holds a part, and the parts are brought together only while `" + name_ +
             "` is called and in its backward. Read it in that layer's forward, or through the model's state_dict()");
}

void Unit::close_with(const std::string& why) {
  c10::StorageImpl* storage = storage_.unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(borrowed(nullptr));
  refuse_access(*storage, "FullyShardedDataParallel: a parameter of `" + name_ + "` " + why);
}

void Unit::remember() {
  for (Parameter& parameter : parameters_) {
    parameter.version = parameter.tensor._version();
    parameter.part_mark = mark_of(parameter.part);
  }
}

int64_t Unit::changes() const {
  int64_t changes = 0;
  for (const Parameter& parameter : parameters_) changes += parameter.tensor._version();
  return changes;
}

std::string Unit::changed() const {
  const c10::StorageImpl* storage = (stays_gathered() ? whole_.storage() : storage_).unsafeGetStorageImpl();
  for (const Parameter& parameter : parameters_)
    if (parameter.version != parameter.tensor._version() || parameter.part_mark != mark_of(parameter.part) ||
        parameter.tensor.storage().unsafeGetStorageImpl() != storage)
      return parameter.name;
  return "";
}

void Unit::gather_changes() {
  if (const Group* rail = groups_.rail()) {
    const at::Tensor piece = piece_of(whole_);
    rail->all_gather_into_tensor(piece.view({groups_.machines(), layout_.slice}), slice_);
  }
  groups_.wait_for_machine();
}

}  // namespace lockstep::fully_sharded
