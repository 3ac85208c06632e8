#include "optim/areas.h"

#include <algorithm>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/rank_names.h"
#include "base/text.h"
#include "checkpoint/sliced_memory.h"
#include "collectives/group_state.h"
#include "data_parallel/divergence.h"
#include "data_parallel/gradient_norm.h"
#include "data_parallel/same_model.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

static_assert(GradientNorm::kBlock % Areas::kAligned == 0);

/// Runs `body` on all ranks; if it fails on some, all throw.
void run_together(const Group& group, const std::function<void()>& body) {
  std::string mine;
  try {
    body();
  } catch (const c10::Error& error) {
    mine = error.what_without_backtrace();
  }
  const auto problems = group.all_gather_bytes(mine);
  TORCH_CHECK(mine.empty(), mine);
  for (const std::string& problem : problems)
    if (!problem.empty()) throw Error(ranks_with(problems, problem) + ": " + problem);
}

/// The bytes between the first element of a tensor and its last.
size_t extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  return static_cast<size_t>(last + 1) * tensor.itemsize();
}

/// Samples of each parameter in an area: three elements of each.
at::Tensor sampled_places(const std::vector<Areas::Parameter>& parameters, size_t area) {
  std::vector<int64_t> places;
  for (const Areas::Parameter& parameter : parameters)
    if (const int64_t elements = parameter.tensor.numel(); parameter.area == area && elements > 0)
      for (const int64_t at : {int64_t{0}, elements / 2, elements - 1}) places.push_back(parameter.offset + at);
  return at::tensor(places, at::kLong);
}

/// Fails if the groups lack parameters that the model trains, naming them.
void check_none_is_missing(const NamedTensors& trained, const Areas& areas) {
  constexpr int kNamed = 8;
  std::string names;
  int missing = 0;
  for (const auto& [name, tensor] : trained)
    if (!areas.contains(tensor) && missing++ < kNamed) names += (missing > 1 ? ", " : "") + name;
  if (missing > kNamed) names += " and " + std::to_string(missing - kNamed) + " more";
  TORCH_CHECK(missing == 0, "ZeroRedundancyOptimizer: ", missing == 1 ? "parameter " : "parameters ", names,
              missing == 1 ? " is" : " are",
              " trained by the model and in none of the parameter groups; put all parameters that the model trains "
              "into groups");
}

int64_t rounded_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

/// Throws on all ranks if a parameter is not bit-identical on all of them.
/// REQUIRES: every rank calls it.
void check_same_values(const Group& group, const std::vector<Areas::Parameter>& parameters) {
  NamedTensors named;
  for (const Areas::Parameter& parameter : parameters) named.emplace_back(parameter.name, parameter.tensor);
  const std::string difference = difference_of_ranks(group, named);
  if (difference.empty()) return;
  throw Error(
      "ZeroRedundancyOptimizer(): the ranks hold different parameters: " + difference +
      ". Each rank steps a part of every parameter for all ranks, so all must start from equal parameters: change or "
      "load them on every rank, or call broadcast_parameters() or average_parameters() before you make the optimizer");
}

/// Fails, naming both, if a parameter shares memory with another tensor of the model, because the move would separate
/// them.
void check_none_overlap(const Areas& areas, const ReplicaState& model, const at::Device& device) {
  struct Extent {
    const std::byte *begin, *end;
    const std::string* name;
    bool moves;
  };
  std::vector<Extent> extents;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.device() != device || tensor.layout() != at::kStrided || tensor.numel() == 0) return;
    const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    extents.push_back({begin, begin + extent_of(tensor), &name, areas.contains(tensor)});
  };
  // Includes ignored ones.
  const NamedTensors parameters = model.attached.source().parameters(), buffers = model.attached.source().buffers();
  for (const NamedTensors* list : {&parameters, &buffers})
    for (const auto& [name, tensor] : *list) add(name, tensor);
  std::sort(extents.begin(), extents.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  for (size_t i = 1, reaches = 0; i < extents.size(); ++i) {  // extents[reaches] has the largest end so far
    const Extent &before = extents[reaches], &now = extents[i];
    TORCH_CHECK(now.begin >= before.end || !(now.moves || before.moves), "ZeroRedundancyOptimizer: ", *before.name,
                " and ", *now.name,
                " lie in the same memory (set_data(), or views of one tensor), but would be separate where the "
                "optimizer keeps parameters; register one tensor under both names, or let each rank step its own copy "
                "with an optimizer made from the parameters");
    if (now.end > before.end) reaches = i;
  }
}

/// Throws on all ranks if their parameters or their order differ.
/// REQUIRES: every rank calls it.
void check_same_places(const Group& group, const Areas& areas, const torch::optim::Optimizer& optimizer) {
  std::string lines;
  for (size_t g = 0; g < optimizer.param_groups().size(); ++g)
    for (const at::Tensor& tensor : optimizer.param_groups()[g].params())
      lines += areas.parameter_of(tensor).name + " of group " + std::to_string(g) + '\n';
  const std::string difference = first_difference("parameter", group.all_gather_bytes(lines));
  if (difference.empty()) return;
  throw Error("the ranks gave their ZeroRedundancyOptimizer different parameters, or gave them in different orders: " +
              difference +
              ". Each rank steps a part of every parameter, so every rank must list the same parameters in the same "
              "groups and in the same order");
}

}  // namespace

Areas::Areas(const ReplicaState& model, const torch::optim::Optimizer& optimizer, const ZeroRedundancyOptions& options,
             const std::string& kind)
    : group_(model.group),
      device_(optim::device_of(optimizer)),
      memory_(on_device() ? nullptr : machine_memory_of(group_)),
      ranks_(memory_ != nullptr ? memory_->ranks_here() : group_.world_size()),
      rank_(memory_ != nullptr ? memory_->rank_here() : group_.rank()) {
  const at::NoGradGuard no_grad;
  TORCH_CHECK(!on_device() || !options.shared_parameters,
              "ZeroRedundancyOptimizer: shared_parameters = true needs parameters on the CPU, and these are on ",
              device_, "; leave it false");
  TORCH_CHECK(
      memory_ != nullptr || !options.shared_parameters,
      "ZeroRedundancyOptimizer: shared_parameters = true needs ranks that share memory, and this group's engine is ",
      group_.backend(), "; leave it false");
  const OperationLabel label("ZeroRedundancyOptimizer()");
  run_together(group_, [&] {
    find_parameters(model.attached.trained(), optimizer);
    check_none_overlap(*this, model, device_);
  });
  check_same_places(group_, *this, optimizer);
  check_same_on_all_ranks(
      group_, "option of the ZeroRedundancyOptimizer",
      c10::str("optimizer ", kind, "\nshared_parameters ", options.shared_parameters, "\nmaster_weights ",
               options.master_weights, "\ndevice ", c10::DeviceTypeName(device_.type(), /*lower_case=*/true), '\n'));
  check_same_values(group_, parameters_);
  for (size_t area = 0; area < areas_.size(); ++area) {
    lay_out(area);
    move_in(area, options.shared_parameters);
  }
  TensorMemory::release();  // where the parameters were
}

Areas::~Areas() { give_back(*this); }

void give_back(const Areas& areas) {
  const at::NoGradGuard no_grad;
  for (const Areas::Parameter& parameter : areas.parameters()) {
    if (!parameter.here.defined() || !parameter.tensor.is_alias_of(parameter.here)) continue;
    try {
      parameter.tensor.set_(parameter.here.clone());
    } catch (const std::exception&) {  // no memory: it stays in place, which keeps the area alive
    }
  }
}

void Areas::find_parameters(const NamedTensors& trained, const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : trained) names.emplace(tensor.unsafeGetTensorImpl(), name);
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& tensor : group.params()) {
      const auto named = names.find(tensor.unsafeGetTensorImpl());
      TORCH_CHECK(named != names.end(), "ZeroRedundancyOptimizer: a parameter of ", tensor.sizes(),
                  " in the groups is not one that the model trains on all ranks; give it an optimizer of its own");
      auto area = std::find_if(areas_.begin(), areas_.end(),
                               [&](const Area& one) { return one.dtype == tensor.scalar_type(); });
      if (area == areas_.end()) area = areas_.insert(area, {.dtype = tensor.scalar_type()});
      places_.emplace(named->first, parameters_.size());
      parameters_.push_back(
          {.name = named->second, .tensor = tensor, .area = static_cast<size_t>(area - areas_.begin())});
      names.erase(named);
    }
  check_none_is_missing(trained, *this);
}

void Areas::lay_out(size_t index) {
  constexpr int64_t kBlock = GradientNorm::kBlock;
  Area& area = areas_[index];
  int64_t all = 0, longest = kAligned;
  for (const Parameter& parameter : parameters_)
    if (parameter.area == index) {
      all += rounded_up(parameter.tensor.numel(), kAligned);
      longest = std::max(longest, rounded_up(parameter.tensor.numel(), kAligned));
    }
  // A gap before each cut, shorter than a block and than any parameter, lets the cut fall between blocks or parameters.
  const int64_t gap = std::min(longest, kBlock);
  area.slice = rounded_up((all + (ranks_ - 1) * gap + ranks_ - 1) / ranks_, gap == kBlock ? kBlock : kAligned);
  area.slice = std::max(area.slice, gap);
  int64_t next = 0;
  for (Parameter& parameter : parameters_) {
    if (parameter.area != index) continue;
    const int64_t elements = parameter.tensor.numel(), cut = (next / area.slice + 1) * area.slice;
    if (next + elements > cut) next = cut - (cut - next) / kBlock * kBlock;
    parameter.offset = next;
    std::tie(parameter.begin, parameter.end) = part_of(parameter, rank_);
    next += rounded_up(elements, kAligned);
  }
  TORCH_INTERNAL_ASSERT(next <= area.slice * ranks_);
}

void Areas::move_in(size_t index, bool shared) {
  const OperationLabel label("the memory of a ZeroRedundancyOptimizer");
  Area& area = areas_[index];
  const int64_t elements = area.slice * ranks_;
  area.parameters = shared ? memory_->allocate_together(elements, area.dtype)
                           : group_.allocate(elements, at::device(device_).dtype(area.dtype));
  for (Parameter& parameter : parameters_) {
    if (parameter.area != index) continue;
    parameter.here = view(area.parameters, parameter);
    if (!shared || rank_ == 0) parameter.here.copy_(parameter.tensor);
  }
  if (shared) group_.barrier();
  for (Parameter& parameter : parameters_)
    if (parameter.area == index)
      parameter.tensor.set_(parameter.here.storage(), parameter.offset, parameter.here.sizes(),
                            parameter.here.strides());
  if (on_device()) area.sampled = sampled_places(parameters_, index).to(device_);
  if (shared || memory_ == nullptr) return;
  area.others = memory_->address_everywhere(area.parameters);
  area.others.erase(area.others.begin() + rank_);
}

const at::Tensor& Areas::array(const Parameter& parameter, const std::string& name, at::ScalarType dtype) {
  Area& area = areas_[parameter.area];
  at::Tensor& array = area.arrays[name];
  if (!array.defined())
    array = memory_ != nullptr ? memory_->allocate_together(area.slice * ranks_, dtype) : own_zeros(area, dtype);
  return array;
}

at::Tensor Areas::own_zeros(const Area& area, at::ScalarType dtype) const {
  if (on_device()) return at::zeros({area.slice}, at::device(device_).dtype(dtype));
  return sliced_zeros(area.slice, dtype, ranks_, rank_);
}

at::Tensor Areas::own_slice(const at::Tensor& array, const Area& area) const {
  return array.numel() == area.slice ? array : array.narrow(0, rank_ * area.slice, area.slice);
}

std::pair<int64_t, int64_t> Areas::part_of(const Parameter& parameter, int rank) const {
  const int64_t slice = area_of(parameter).slice, elements = parameter.tensor.numel();
  return {std::clamp<int64_t>(rank * slice - parameter.offset, 0, elements),
          std::clamp<int64_t>((rank + 1) * slice - parameter.offset, 0, elements)};
}

at::Tensor Areas::mine(const at::Tensor& array, const Parameter& parameter) const {
  if (parameter.begin >= parameter.end) return array.narrow(0, 0, 0);
  const int64_t slice = area_of(parameter).slice, first = array.numel() == slice ? rank_ * slice : 0;
  return array.narrow(0, parameter.offset + parameter.begin - first, parameter.end - parameter.begin);
}

at::Tensor Areas::view(const at::Tensor& array, const Parameter& parameter) {
  return at::empty({0}, array.options())
      .set_(array.storage(), parameter.offset, parameter.tensor.sizes(), parameter.tensor.strides());
}

at::Tensor Areas::whole(const at::Tensor& array, const Area& area) const {
  const at::Tensor all = at::empty({area.slice * ranks_}, array.options());
  group_.all_gather_into_tensor(all, own_slice(array, area));
  return all;
}

void Areas::gather_parameters(const std::function<bool(const Parameter&)>& is_stepped) const {
  if (memory_ != nullptr) return;
  const OperationLabel label("the end of an optimizer's step");
  std::vector<std::pair<const Parameter*, at::Tensor>> kept;  // what no rank has stepped stays each rank's own
  for (const Parameter& parameter : parameters_)
    if (!is_stepped(parameter)) kept.emplace_back(&parameter, parameter.here.clone());
  for (const Area& area : areas_) group_.all_gather_into_tensor(area.parameters, own_slice(area.parameters, area));
  for (const auto& [parameter, values] : kept) parameter->here.copy_(values);
}

void Areas::complete() {
  if (memory_ != nullptr) return;
  const OperationLabel label("the state of a ZeroRedundancyOptimizer, to be saved");
  for (const Area& area : areas_)
    for (const auto& [name, array] : area.arrays) group_.all_gather_into_tensor(array, own_slice(array, area));
  is_complete_ = true;
}

void Areas::forget_others() {
  if (!std::exchange(is_complete_, false)) return;
  for (const Area& area : areas_)
    for (const auto& [name, array] : area.arrays) forget_other_slices(array);
}

}  // namespace lockstep::detail
