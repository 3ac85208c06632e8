#include "fully_sharded/gradient_parts.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/rank_names.h"
#include "fully_sharded/told_to_all.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_hook.h"
#include "reducer/scaled_passes.h"

namespace lockstep::fully_sharded {
namespace {

at::Tensor as(const at::Tensor& bytes, int64_t elements, at::ScalarType dtype) {
  return bytes.narrow(0, 0, elements * static_cast<int64_t>(c10::elementSize(dtype))).view(dtype);
}

std::string problem_of(const Unit::Parameter& parameter, const at::Tensor& gradient) {
  const std::string subject = "FullyShardedDataParallel: the gradient of " + parameter.name;
  if (gradient.layout() != at::kStrided)
    return subject + " is sparse; make the layer produce dense ones (for an Embedding: sparse = false)";
  if (gradient.requires_grad())
    return subject +
           " requires grad itself, as backward(create_graph) makes it; gradients are summed over ranks without a graph";
  return "";
}

}  // namespace

GradientParts::GradientParts(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check)
    : groups_(groups), units_(units), check_(check), means_(units.size()), scaled_(groups.all(), units) {
  int64_t bytes = 0;
  for (const Unit& unit : units_) {
    bytes = std::max(bytes, unit.elements() * static_cast<int64_t>(c10::elementSize(added_type(unit))));
    first_flag_.push_back(parameters_);
    parameters_ += unit.parameters().size();
  }
  gradients_ = groups_.allocate_summed(bytes, at::kByte);
  used_ = at::zeros({2 * static_cast<int64_t>(parameters_) + 4}, at::kInt);
}

at::ScalarType GradientParts::added_type(const Unit& unit) const {
  return adds_twice() && optim::is_16_bit(unit.dtype()) ? at::kFloat : unit.dtype();
}

at::Tensor GradientParts::own_gradients(const Unit& unit) const {
  return as(gradients_, unit.elements(), added_type(unit));
}

bool GradientParts::is_under_way(const at::Tensor& gradient) const {
  if (!under_way_) return false;
  const auto* begin = static_cast<const std::byte*>(gradient.const_data_ptr());
  return begin < under_way_->end && under_way_->begin < begin + gradient.nbytes();
}

void GradientParts::take(size_t number) {
  const at::NoGradGuard no_grad;
  if (under_way_ && under_way_->sums.is_completed()) finish_under_way();
  Unit& unit = units_[number];
  const at::Tensor mine = own_gradients(unit);
  auto* taken = used_.mutable_data_ptr<int32_t>() + first_flag_[number];
  for (const Unit::Parameter& parameter : unit.parameters()) {
    int32_t& is_taken = *taken++;
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (!gradient.defined() || !problem_of(parameter, gradient).empty()) continue;
    const at::Tensor place = Unit::view(mine, parameter);
    if (is_under_way(place)) continue;
    if (std::exchange(is_taken, 1) == 1)  // of a nested backward, which reaches the parameter on its own
      place.copy_(place.to(gradient.scalar_type()).add_(gradient));
    else
      place.copy_(gradient);
    gradient.reset();
  }
}

std::string GradientParts::collect(size_t number) {
  finish_under_way();
  take(number);
  Unit& unit = units_[number];
  const at::Tensor mine = own_gradients(unit);
  std::string trouble;
  auto* taken = used_.mutable_data_ptr<int32_t>() + first_flag_[number];
  for (const Unit::Parameter& parameter : unit.parameters()) {
    int32_t& is_taken = *taken++;
    at::Tensor& gradient = parameter.tensor.mutable_grad();
    if (gradient.defined() && trouble.empty()) trouble = problem_of(parameter, gradient);
    gradient.reset();
    if (is_taken == 0) Unit::view(mine, parameter).zero_();
  }
  return trouble;
}

std::string GradientParts::add(size_t number) {
  const OperationLabel label("the gradients of a unit");
  Unit& unit = units_[number];
  std::string trouble = collect(number);
  const at::Tensor mine = own_gradients(unit);
  const at::Tensor mean = at::empty({unit.slice_elements()}, unit.dtype());
  const ReduceOp op = adds_twice() ? ReduceOp::kSum : ReduceOp::kMean;
  at::Tensor rows = mine;
  if (groups_.here() != nullptr) {
    check_.meet(*groups_.here(), number, UseCheck::What::kGradients);
    rows = groups_.rail() == nullptr ? mean : unit.piece_of(mine);
    groups_.here()->reduce_scatter_tensor(rows, mine.view({groups_.ranks_here(), rows.numel()}), op);
  }
  means_[number] = mean;
  const Group* rail = groups_.rail();
  if (rail == nullptr) {
    if (groups_.here() == nullptr) mean.copy_(mine);
    return trouble;
  }
  UseCheck::Sent word = check_.send(*rail, number, UseCheck::What::kGradients);
  auto* const begin = static_cast<std::byte*>(rows.mutable_data_ptr());
  const at::Tensor sum = rows.scalar_type() == mean.scalar_type() ? mean : at::empty(mean.sizes(), rows.scalar_type());
  under_way_.emplace(
      UnderWay{rail->reduce_scatter_async(sum, rows.view({groups_.machines(), unit.slice_elements()}), op),
               std::move(word), sum, mean, begin, begin + rows.nbytes()});
  bytes_sent_ += groups_.bytes_sent(static_cast<int64_t>(sum.nbytes()));
  return trouble;
}

void GradientParts::finish_under_way() {
  if (!under_way_) return;
  UnderWay under_way = std::move(*under_way_);
  under_way_.reset();
  check_.finish_before(under_way.word, under_way.sums);
  if (adds_twice()) under_way.sum.div_(groups_.all().world_size());
  if (!under_way.sum.is_same(under_way.mean)) under_way.mean.copy_(under_way.sum);
}

void GradientParts::check_same_before(const int32_t* had) const {
  const int32_t ranks = groups_.all().world_size();
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters()) {
      if (const int32_t some = *had++; some == 0 || some == ranks) continue;
      const auto with = groups_.all().all_gather_bytes(parameter.part.grad().defined() ? "1" : "0");
      throw Error(
          "FullyShardedDataParallel: before this backward some ranks had gradients of earlier ones and others had "
          "none: " +
          ranks_with(with, std::string("1")) + " one of " + parameter.name + ", and " +
          ranks_with(with, std::string("0")) +
          " none. Every rank must call zero_grad() and step() after the same backward passes");
    }
}

void GradientParts::refuse_scale_on_some(bool is_scaled) const {
  const auto scaled = groups_.all().all_gather_bytes(is_scaled ? "1" : "0");
  throw Error("FullyShardedDataParallel: the loss of this backward went through GradScaler::scale() on " +
              ranks_with(scaled, std::string("1")) + ", and on " + ranks_with(scaled, std::string("0")) +
              " not, so the sum of gradients has parts of two scales; scale every loss on every rank");
}

void GradientParts::refuse_zeros_on_some() const {
  const auto zeroed = groups_.all().all_gather_bytes(before_.zeroed ? "1" : "0");
  throw Error("FullyShardedDataParallel: before this backward " + ranks_with(zeroed, std::string("1")) +
              " had set gradients to zero, as zero_grad(false) does, and " + ranks_with(zeroed, std::string("0")) +
              " had not. Every rank must call zero_grad() and step() after the same backward passes");
}

void GradientParts::finish(const std::string& trouble) {
  const OperationLabel label("the end of a backward of a FullyShardedDataParallel");
  finish_under_way();
  auto* used = used_.mutable_data_ptr<int32_t>();
  int32_t* had = used + parameters_;
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters()) *had++ = parameter.part.grad().defined();
  *had = trouble.empty() ? 0 : 1;
  int32_t* const scaled = had + 1;
  const bool is_scaled = ScaledPasses::known_to_any(current_backward());
  *scaled = is_scaled;
  scaled[1] = before_.zeroed;
  scaled[2] = before_.kept;
  groups_.all().all_reduce(used_);
  if (*had > 0) refuse_troubles(groups_.all().all_gather_bytes(trouble));
  if (*scaled > 0 && *scaled < groups_.all().world_size()) refuse_scale_on_some(is_scaled);
  if (scaled[1] > 0 && scaled[2] > 0) refuse_zeros_on_some();
  check_same_before(used + parameters_);
  for (size_t number = 0; number < units_.size(); ++number) {
    const at::Tensor mean = std::exchange(means_[number], {});
    if (!mean.defined()) continue;
    Unit& unit = units_[number];
    for (size_t i = 0; i < unit.parameters().size(); ++i) {
      Unit::Parameter& parameter = unit.parameters()[i];
      if (used[first_flag_[number] + i] == 0) continue;
      const int64_t first = parameter.part.storage_offset() - unit.slice().storage_offset();
      // Not a view: C++'s zero_grad() calls detach_(), which views refuse.
      const at::Tensor gradient =
          at::empty({0}, mean.options()).set_(mean.storage(), first, {parameter.part.numel()}, {1});
      at::Tensor& all = parameter.part.mutable_grad();
      if (all.defined())
        all.add_(gradient);
      else
        all = gradient;
    }
  }
  used_.zero_();
}

}  // namespace lockstep::fully_sharded
