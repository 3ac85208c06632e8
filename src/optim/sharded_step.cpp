#include "optim/sharded_step.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/rank_names.h"
#include "checkpoint/master_state.h"
#include "collectives/group_state.h"
#include "data_parallel/same_model.h"
#include "rank_page/operation_label.h"

namespace lockstep::detail {
namespace {

/// Elements: 64 bytes or a multiple in every dtype.
constexpr int64_t kAligned = 32;

int64_t round_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

MachineMemory& memory_of(const Group& group) {
  auto* memory = dynamic_cast<MachineMemory*>(state_of(group).backend.get());
  TORCH_CHECK(memory != nullptr,
              "ZeroRedundancyOptimizer shares out the steps of ranks in shared memory, and this group's engine is ",
              group.backend(), "; give it the parameters, and each rank steps its own copy");
  return *memory;
}

at::Tensor view_of(const at::Tensor& flat, int64_t offset, const at::Tensor& like) {
  return at::empty({0}, flat.options()).set_(flat.storage(), offset, like.sizes(), like.strides());
}

uint64_t hash_of(const optim::StepConstants& constants) {
  uint64_t hash = Hash::kStart;
  for (const double value : {constants.weight_decay, constants.decay, constants.step_size, constants.momentum,
                             constants.dampened, constants.beta2, constants.root, constants.eps}) {
    uint64_t word;
    std::memcpy(&word, &value, sizeof word);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

/// Of three places: gradients that were not reduced differ in them.
uint64_t sample_of(const at::Tensor& gradient) {
  uint64_t hash = Hash::kStart;
  const auto* bytes = static_cast<const std::byte*>(gradient.const_data_ptr());
  const size_t size = gradient.is_non_overlapping_and_dense() ? gradient.nbytes() : 0,
               piece = std::min<size_t>(size, 8);
  for (const size_t at : {size_t{0}, (size - piece) / 2, size - piece}) {
    uint64_t word = 0;
    if (piece > 0) std::memcpy(&word, bytes + at, piece);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

/// The ranks whose row differs from rank 0's in a column; empty if none does.
std::string odd_ranks(const at::Tensor& rows, int64_t column) {
  std::vector<bool> odd;
  for (int64_t rank = 0; rank < rows.size(0); ++rank)
    odd.push_back(rows[rank][column].item<int64_t>() != rows[0][column].item<int64_t>());
  return std::find(odd.begin(), odd.end(), true) == odd.end() ? "" : rank_names(odd);
}

}  // namespace

ShardedStep::ShardedStep(const Replica& model, const torch::optim::Optimizer& optimizer, FormulaKind kind,
                         ZeroRedundancyOptions options)
    : model_(state_of(model)),
      formula_(formula_of(kind)),
      options_(options),
      group_(model_.group),
      memory_(memory_of(group_)) {
  const at::NoGradGuard no_grad;
  find_parameters(optimizer, model_.trained);
  check_same_on_all_ranks(group_, "option of the ZeroRedundancyOptimizer",
                          c10::str("optimizer ", static_cast<int>(kind), "\nshared_parameters ",
                                   options_.shared_parameters, "\nmaster_weights ", options_.master_weights, '\n'));
  for (size_t area = 0; area < areas_.size(); ++area) move_in(area);
}

ShardedStep::~ShardedStep() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    if (!parameter.tensor.is_alias_of(parameter.here)) continue;
    try {
      parameter.tensor.set_(parameter.here.clone());
    } catch (const std::exception&) {  // no memory: it stays where it lies, which keeps that
    }
  }
}

void ShardedStep::find_parameters(const torch::optim::Optimizer& optimizer, const NamedTensors& trained) {
  std::unordered_map<const c10::TensorImpl*, std::string> names;
  for (const auto& [name, tensor] : trained) names.emplace(tensor.unsafeGetTensorImpl(), name);
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& tensor : group.params()) {
      const auto named = names.find(tensor.unsafeGetTensorImpl());
      TORCH_CHECK(named != names.end(), "ZeroRedundancyOptimizer: a parameter of ", tensor.sizes(),
                  " in the groups is none that the model trains on all ranks; give it an optimizer of its own");
      const at::ScalarType dtype = tensor.scalar_type();
      auto area = std::find_if(areas_.begin(), areas_.end(), [&](const Area& one) { return one.dtype == dtype; });
      if (area == areas_.end())
        area = areas_.insert(area, {.dtype = dtype, .masters = options_.master_weights && optim::is_16_bit(dtype)});
      places_.emplace(named->first, parameters_.size());
      parameters_.push_back({.name = named->second,
                             .tensor = tensor,
                             .area = static_cast<size_t>(area - areas_.begin()),
                             .offset = area->elements,
                             .here = {}});
      area->elements += round_up(tensor.numel(), kAligned);
      names.erase(named);
    }
  TORCH_CHECK(names.empty(), "ZeroRedundancyOptimizer: parameter ", names.begin()->second,
              " is trained by the model and in none of the parameter groups");
}

void ShardedStep::move_in(size_t index) {
  const OperationLabel label("the memory of a ZeroRedundancyOptimizer");
  Area& area = areas_[index];
  const bool shared = options_.shared_parameters;
  area.parameters =
      shared ? memory_.allocate_together(area.elements, area.dtype) : group_.allocate(area.elements, area.dtype);
  for (Parameter& parameter : parameters_) {
    if (parameter.area != index) continue;
    parameter.here = view_of(area.parameters, parameter.offset, parameter.tensor);
    if (!shared || group_.rank() == 0) parameter.here.copy_(parameter.tensor);
  }
  if (shared) group_.barrier();
  for (Parameter& parameter : parameters_)
    if (parameter.area == index)
      parameter.tensor.set_(parameter.here.storage(), parameter.offset, parameter.here.sizes(),
                            parameter.here.strides());
  if (shared) return;
  area.others = memory_.address_everywhere(area.parameters);
  area.others.erase(area.others.begin() + group_.rank());
}

std::string ShardedStep::trouble(const torch::optim::Optimizer& optimizer) const {
  if (model_.join != nullptr)
    return "ZeroRedundancyOptimizer::step() within join(): ranks that have run out of inputs would not call it; step "
           "with the optimizer of each rank, made from the parameters";
  if (model_.passes.since_reduction != 0)
    return c10::str("ZeroRedundancyOptimizer::step(): the gradients of ", model_.passes.since_reduction,
                    " backward passes wait in .grad, of this rank alone; step after the backward that reduces them, or "
                    "call reduce_gradients() first");
  const std::string problem = optim::problem_of(optimizer);
  if (!problem.empty()) return problem;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& tensor : group.params())
      if (!places_.contains(tensor.unsafeGetTensorImpl()))
        return "ZeroRedundancyOptimizer: a parameter was added to its groups after it was made; make a new one, of all "
               "parameters";
  for (const Parameter& parameter : parameters_)
    if (parameter.tensor.const_data_ptr() != parameter.here.const_data_ptr() ||
        parameter.tensor.scalar_type() != parameter.here.scalar_type() ||
        parameter.tensor.sizes() != parameter.here.sizes() || parameter.tensor.strides() != parameter.here.strides())
      return "ZeroRedundancyOptimizer: parameter " + parameter.name +
             " no longer lies where the optimizer has put it (to(), set_data(), or another tensor in its place); "
             "make a new optimizer";
  return "";
}

void ShardedStep::agree(const std::string& trouble, const std::vector<optim::Intent>& intents) const {
  const OperationLabel label("what ranks say before an optimizer's step");
  uint64_t what = Hash::kStart, gradients = Hash::kStart;
  for (const optim::Intent& intent : intents) {
    what = Hash::mixed(what, places_.at(intent.parameter.unsafeGetTensorImpl()));
    what = Hash::mixed(what, static_cast<uint64_t>(intent.algorithm));
    what = Hash::mixed(what, hash_of(intent.constants));
    gradients = Hash::mixed(gradients, sample_of(intent.parameter.grad()));
  }
  const at::Tensor mine = at::empty({3}, at::kLong);
  auto* said = mine.mutable_data_ptr<int64_t>();
  said[0] = trouble.empty() ? 0 : 1;
  said[1] = static_cast<int64_t>(what);
  said[2] = static_cast<int64_t>(gradients);
  const at::Tensor all = group_.all_gather(mine);
  if (all.select(1, 0).any().item<bool>()) {
    const auto texts = group_.all_gather_bytes(trouble);
    const auto& first = *std::find_if(texts.begin(), texts.end(), [](const auto& text) { return !text.empty(); });
    throw Error(ranks_with(texts, first) + ": " + first);
  }
  if (const std::string odd = odd_ranks(all, 1); !odd.empty())
    throw Error("ZeroRedundancyOptimizer: " + odd +
                " would step other parameters than rank 0, at another rate or from "
                "another state; set options and load states on every rank, and take no gradients away on some");
  if (const std::string odd = odd_ranks(all, 2); !odd.empty())
    throw Error("ZeroRedundancyOptimizer: " + odd +
                " has other gradients than rank 0, so they were not reduced over all "
                "ranks or changed since; steps with gradients of one's own (post-local SGD) need an optimizer on each "
                "rank, made from the parameters");
}

std::pair<int64_t, int64_t> ShardedStep::slice_of(const Parameter& parameter) const {
  const int64_t elements = areas_[parameter.area].elements, count = group_.world_size(), rank = group_.rank();
  const int64_t part = round_up((elements + count - 1) / count, kAligned);
  const int64_t begin = rank * part - parameter.offset, end = (rank + 1) * part - parameter.offset;
  return {std::max<int64_t>(begin, 0), std::min(end, parameter.tensor.numel())};
}

at::Tensor ShardedStep::adopt(at::Tensor& array, const Parameter& parameter, const at::Tensor& held,
                              at::ScalarType dtype) {
  if (!array.defined()) array = memory_.allocate_together(areas_[parameter.area].elements, dtype);
  if (held.defined() && held.is_alias_of(array)) return held;
  // New, or loaded: this rank brings its slice, which is all that it will read.
  const at::Tensor here = view_of(array, parameter.offset, parameter.tensor);
  if (const auto [begin, end] = slice_of(parameter); begin < end) {
    const at::Tensor mine = array.narrow(0, parameter.offset + begin, end - begin);
    if (held.defined())
      mine.copy_(optim::laid_out(held, dtype, parameter.tensor)
                     .as_strided({parameter.tensor.numel()}, {1})
                     .narrow(0, begin, end - begin));
    else
      mine.zero_();
  }
  return here;
}

optim::Plan ShardedStep::plan(torch::optim::Optimizer& optimizer, const optim::Intent& intent) {
  const Parameter& parameter = parameters_[places_.at(intent.parameter.unsafeGetTensorImpl())];
  Area& area = areas_[parameter.area];
  const at::ScalarType dtype = area.masters ? at::kFloat : area.dtype;
  optim::Plan result = optim::plan_of(intent, area.masters);
  std::tie(result.begin, result.end) = slice_of(parameter);
  for (std::byte* other : area.others)
    result.copies.push_back(other + static_cast<size_t>(parameter.offset) * result.element);
  const int arrays = optim::state_arrays(intent.algorithm);
  if (arrays == 0 && !area.masters) return result;
  auto& state = optim::state_of(optimizer, intent.parameter, formula_, area.masters);
  for (int a = 0; a < arrays; ++a) {
    const at::Tensor array = adopt(area.arrays[static_cast<size_t>(a)], parameter, formula_.array(state, a), dtype);
    formula_.set_array(state, a, array);
    result.arrays[static_cast<size_t>(a)] = static_cast<std::byte*>(array.mutable_data_ptr());
  }
  if (area.masters) {
    at::Tensor& master = dynamic_cast<Master&>(state).master_param;
    master = adopt(area.master, parameter, master, at::kFloat);
    result.master = static_cast<std::byte*>(master.mutable_data_ptr());
  }
  formula_.count(state);
  return result;
}

void ShardedStep::step(torch::optim::Optimizer& optimizer) {
  const at::NoGradGuard no_grad;
  const std::string problem = trouble(optimizer);
  std::vector<optim::Intent> intents;
  if (problem.empty()) intents = optim::intents_of(optimizer, formula_);
  agree(problem, intents);
  std::vector<optim::Plan> plans;
  for (const optim::Intent& intent : intents) plans.push_back(plan(optimizer, intent));
  optim::run(plans);
  const OperationLabel label("the end of an optimizer's step");
  group_.barrier();
  for (const optim::Intent& intent : intents) intent.parameter.unsafeGetTensorImpl()->bump_version();
}

void DeleteShardedStep::operator()(ShardedStep* step) const { delete step; }

ShardedStepPtr shard(const Replica& model, const torch::optim::Optimizer& optimizer, FormulaKind kind,
                     const ZeroRedundancyOptions& options) {
  if (state_of(model).group.world_size() == 1) return nullptr;
  TORCH_CHECK(kind != FormulaKind::kNone,
              "ZeroRedundancyOptimizer shares out the steps of SGD, Adam and AdamW; give it "
              "the parameters, and each rank steps its own copy");
  return ShardedStepPtr(new ShardedStep(model, optimizer, kind, options));
}

void step(ShardedStep& sharded, torch::optim::Optimizer& optimizer) { sharded.step(optimizer); }

std::vector<at::Tensor> trained_parameters(const Replica& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state_of(model).trained) tensors.push_back(tensor);
  return tensors;
}

}  // namespace lockstep::detail
