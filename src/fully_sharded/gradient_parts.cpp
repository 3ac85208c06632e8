#include "fully_sharded/gradient_parts.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "base/error.h"
#include "rank_page/operation_label.h"

namespace lockstep::fully_sharded {
namespace {

at::Tensor as(const at::Tensor& bytes, int64_t elements, at::ScalarType dtype) {
  return bytes.narrow(0, 0, elements * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

void check_gradient(const Unit::Parameter& parameter, const at::Tensor& gradient) {
  TORCH_CHECK(gradient.layout() == at::kStrided, "FullyShardedDataParallel: the gradient of ", parameter.name,
              " is sparse; make the layer produce dense ones (for an Embedding: sparse = false)");
  TORCH_CHECK(
      !gradient.requires_grad(), "FullyShardedDataParallel: the gradient of ", parameter.name,
      " requires grad itself, as backward(create_graph) makes it; gradients are summed over ranks without a graph");
}

}  // namespace

GradientParts::GradientParts(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check)
    : groups_(groups), units_(units), check_(check), kept_(units.size()), sums_(units.size()) {
  int64_t bytes = 0;
  size_t parameters = 0;
  for (const Unit& unit : units_) {
    bytes = std::max(bytes, unit.bytes());
    first_flag_.push_back(parameters);
    parameters += unit.parameters().size();
  }
  gradients_ = groups_.allocate_summed(bytes, at::kByte);
  if (groups_.here() != nullptr && groups_.rail() != nullptr)
    rail_sums_ = at::empty({bytes / groups_.ranks_here()}, at::kByte);
  used_ = at::zeros({static_cast<int64_t>(parameters) + 2}, at::kInt);
}

void GradientParts::collect(Unit& unit, size_t number, const at::Tensor& memory) {
  memory.zero_();
  auto* used = used_.mutable_data_ptr<int32_t>() + first_flag_[number];
  for (const Unit::Parameter& parameter : unit.parameters()) {
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined()) {
      check_gradient(parameter, gradient);
      Unit::view(memory, parameter).copy_(gradient);
      *used = 1;
      gradient.reset();
    }
    ++used;
  }
}

void GradientParts::add(size_t number) {
  const OperationLabel label("the gradients of a unit");
  Unit& unit = units_[number];
  finish_under_way();  // it reads the memory that comes next
  const at::Tensor mine = as(gradients_, unit.elements(), unit.dtype());
  collect(unit, number, mine);
  const at::Tensor sum = memory_for_sums(number);
  at::Tensor rows = mine;
  if (groups_.here() != nullptr) {
    check_.meet(*groups_.here(), number, UseCheck::What::kGradients);
    const int64_t piece = unit.slice_elements() * groups_.machines();
    rows = groups_.rail() == nullptr ? sum : as(rail_sums_, piece, unit.dtype());
    groups_.here()->reduce_scatter_tensor(rows, mine.view({groups_.ranks_here(), piece}));
  }
  sums_[number] = sum;
  const Group* rail = groups_.rail();
  if (rail == nullptr) {
    if (groups_.here() == nullptr) sum.copy_(mine);
    return;
  }
  UseCheck::Sent word = check_.send(*rail, number, UseCheck::What::kGradients);
  under_way_.emplace(UnderWay{rail->reduce_scatter_async(sum, rows.view({groups_.machines(), unit.slice_elements()})),
                              std::move(word)});
  bytes_sent_ += groups_.bytes_sent(unit.slice_bytes());
}

at::Tensor GradientParts::memory_for_sums(size_t number) {
  const Unit& unit = units_[number];
  const bool adds_up = std::any_of(unit.parameters().begin(), unit.parameters().end(),
                                   [](const Unit::Parameter& one) { return one.part.grad().defined(); });
  adding_up_ += adds_up;
  if (adds_up) return at::empty({unit.slice_elements()}, unit.dtype());
  if (!kept_[number].defined()) kept_[number] = at::empty({unit.slice_elements()}, unit.dtype());
  return kept_[number];
}

void GradientParts::finish_under_way() {
  if (!under_way_) return;
  const UnderWay under_way = std::move(*under_way_);
  under_way_.reset();
  under_way.sums.wait();
  check_.finish(under_way.word);
}

void GradientParts::finish() {
  const OperationLabel label("the end of a backward of a FullyShardedDataParallel");
  finish_under_way();
  auto* used = used_.mutable_data_ptr<int32_t>();
  int32_t* const adding = used + used_.numel() - 2;
  adding[0] = adding_up_;
  adding[1] = adding_up_ * adding_up_;
  groups_.all().all_reduce(used_);
  // Numbers are equal where their squares are no more than they must be.
  const int64_t total = adding[0], ranks = groups_.all().world_size();
  if (adding[1] * ranks != total * total)
    throw Error(
        "FullyShardedDataParallel: before this backward some ranks had gradients of earlier ones and others had "
        "none; rank " +
        std::to_string(groups_.all().rank()) + " had them of " + std::to_string(adding_up_) +
        " units. Every rank calls the optimizer's zero_grad() and step() after the same backward passes");
  for (size_t number = 0; number < units_.size(); ++number) {
    const at::Tensor sum = std::exchange(sums_[number], {});
    if (!sum.defined()) continue;
    sum.div_(groups_.all().world_size());
    Unit& unit = units_[number];
    for (size_t i = 0; i < unit.parameters().size(); ++i) {
      Unit::Parameter& parameter = unit.parameters()[i];
      if (used[first_flag_[number] + i] == 0) continue;
      const int64_t first = parameter.part.storage_offset() - unit.slice().storage_offset();
      // No view: C++'s zero_grad() calls detach_(), which views refuse.
      const at::Tensor gradient =
          at::empty({0}, sum.options()).set_(sum.storage(), first, {parameter.part.numel()}, {1});
      at::Tensor& all = parameter.part.mutable_grad();
      if (all.defined())
        all.add_(gradient);
      else
        all = gradient;
    }
  }
  used_.zero_();
  adding_up_ = 0;
}

}  // namespace lockstep::fully_sharded
