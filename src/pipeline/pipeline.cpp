#include <lockstep/pipeline.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <lockstep/error.h>

#include "base/rank_names.h"
#include "checkpoint/sliced_memory.h"
#include "collectives/sample.h"
#include "data_parallel/same_model.h"
#include "pipeline/stage.h"
#include "pipeline/stage_layers.h"
#include "rank_page/operation_label.h"
#include "reducer/reduction_plan.h"

namespace lockstep {
namespace {

/// Fills in the options that the user has left open, for this number of layers.
PipelineOptions completed(PipelineOptions options, size_t layers, const Group& group) {
  if (options.stages == 0) options.stages = group.world_size();
  if (options.micro_batches == 0) options.micro_batches = 2 * options.stages;
  std::string text = "layers: " + std::to_string(layers) + "\nstages: " + std::to_string(options.stages) +
                     "\nmicro_batches: " + std::to_string(options.micro_batches) +
                     "\nin_flight: " + std::to_string(options.in_flight) + "\ncuts:";
  for (const size_t cut : options.cuts) text += ' ' + std::to_string(cut);
  check_same_on_all_ranks(group, "option", text);
  TORCH_CHECK(options.stages > 0 && group.world_size() % options.stages == 0, "Pipeline: ", options.stages,
              " stages; their number must divide that of the ranks, ", group.world_size());
  TORCH_CHECK(options.micro_batches > 0, "Pipeline: ", options.micro_batches, " micro_batches; give at least 1");
  TORCH_CHECK(options.in_flight >= 0, "Pipeline: in_flight = ", options.in_flight,
              "; give the number of micro-batches in flight, or 0 to let the Pipeline choose");
  const auto stages = static_cast<size_t>(options.stages);
  TORCH_CHECK(layers >= stages, "Pipeline: ", layers, " layers cannot be cut into ", stages, " stages");
  TORCH_CHECK(options.cuts.empty() || options.cuts.size() + 1 == stages, "Pipeline: ", options.cuts.size(),
              " cuts make ", options.cuts.size() + 1, " stages, not ", stages);
  size_t last = 0;
  for (const size_t cut : options.cuts) {
    TORCH_CHECK(cut > last && cut < layers, "Pipeline: the cuts must be ascending numbers of layers from 1 to ",
                layers - 1, ", so that each stage has a layer");
    last = cut;
  }
  TORCH_CHECK(!several_virtual_ranks(group),
              "Pipeline: virtual ranks cannot be spread over stages; start as many ranks as the run had before");
  return options;
}

std::vector<NamedMaker> numbered(const std::vector<Pipeline::MakeLayer>& layers) {
  std::vector<NamedMaker> named;
  for (size_t i = 0; i < layers.size(); ++i) {
    TORCH_CHECK(layers[i], "Pipeline: the function of layer ", i, " is empty");
    named.push_back({std::to_string(i), layers[i]});
  }
  return named;
}

constexpr int64_t kAlignment = 64;

int64_t bytes_of(const StageLayers::Known& known) {
  const int64_t bytes = c10::multiply_integers(known.sizes) * static_cast<int64_t>(c10::elementSize(known.dtype));
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

uint64_t sample_of_state(const StateDict& state) {
  uint64_t hash = 1;
  for (const auto& item : state)
    if (!is_partial(item.value().storage()))  // that is from one state in memory
      hash = Hash::mixed(hash, sample_of(item.value().detach().cpu()));
  return hash;
}

}  // namespace

class Pipeline::State {
 public:
  State(const std::vector<NamedMaker>& makers, const Group& all, const PipelineOptions& given, uint64_t seed)
      : group(all),
        options(completed(given, makers.size(), all)),
        replicas(group.world_size() / options.stages),
        number(group.rank() / replicas),
        layers(make_stage(makers, group, options, number)),
        ranks(group.split(group.rank() % replicas)),
        model(layers.own, group.split(number)),
        stage(ranks, model, options,
              "rank " + std::to_string(group.rank()) + ", which has stage " + std::to_string(number)),
        shard(group.rank() % replicas, replicas, seed) {}

  /// Throws on all ranks if some have stepped or cleared gradients since the last pass, and others have not.
  void check_steps() const {
    std::string mine;
    try {
      mine = stage.done();
    } catch (const c10::Error& error) {
      mine = '!' + error.what_without_backtrace();
    }
    const auto all = group.all_gather_bytes(mine);
    for (const std::string& one : all)
      if (one.starts_with('!')) throw Error(ranks_with(all, one) + ": " + one.substr(1));
    if (std::any_of(all.begin(), all.end(), [&](const std::string& one) { return one != all.front(); }))
      throw Error("Pipeline: the ranks did different things since the last forward_backward(): " +
                  ranks_of_each(all, "") + "; call optimizer.step() and zero_grad() on every rank, or on none");
  }

  const Group group;
  const PipelineOptions options;
  const int replicas;  ///< pipelines
  const int number;    ///< of this rank's stage
  const StageLayers layers;
  const Group ranks;  ///< of this pipeline
  Stage::Model model;
  Stage stage;
  const Shard shard;
};

Pipeline::Pipeline(torch::nn::Sequential layers, const Context& context, PipelineOptions options)
    : state_(std::make_unique<State>(makers_of(layers), context.group(), options, context.seed())) {}
Pipeline::Pipeline(torch::nn::Sequential layers, const Group& group, PipelineOptions options)
    : state_(std::make_unique<State>(makers_of(layers), group, options, 0)) {}
Pipeline::Pipeline(const std::vector<MakeLayer>& layers, const Context& context, PipelineOptions options)
    : state_(std::make_unique<State>(numbered(layers), context.group(), options, context.seed())) {}
Pipeline::Pipeline(const std::vector<MakeLayer>& layers, const Group& group, PipelineOptions options)
    : state_(std::make_unique<State>(numbered(layers), group, options, 0)) {}
Pipeline::~Pipeline() = default;

double Pipeline::forward_backward(const at::Tensor& input, const at::Tensor& target, const Loss& loss) {
  return state_->stage.forward_backward(input, target, loss);
}

at::Tensor Pipeline::forward(const at::Tensor& input) { return state_->stage.forward(input); }

int Pipeline::stage() const { return state_->number; }
int Pipeline::stages() const { return state_->options.stages; }
torch::nn::Sequential Pipeline::layers() const { return state_->layers.own; }
DistributedDataParallel<torch::nn::Sequential>& Pipeline::replica() { return state_->model; }
Shard Pipeline::shard() const { return state_->shard; }

double Pipeline::clip_grad_norm(double max_norm, double norm_type) {
  State& state = *state_;
  state.stage.check_usable();
  TORCH_CHECK(max_norm >= 0, "Pipeline: clip_grad_norm(", max_norm, "): the norm must be at least 0");
  const double own = state.model.clip_grad_norm(std::numeric_limits<double>::infinity(), norm_type);
  const OperationLabel label("Pipeline::clip_grad_norm()");
  const at::Tensor all = state.ranks.all_gather(at::tensor({own, max_norm, norm_type}, at::kDouble));
  const auto column = [&](int64_t number) { return all.select(1, number); };
  if (!column(1).eq(max_norm).all().item<bool>() || !column(2).eq(norm_type).all().item<bool>())
    throw Error(
        "Pipeline: clip_grad_norm() was given different arguments on other stages; give the same on every rank");
  const bool largest = std::isinf(norm_type);
  const double norm =
      largest ? column(0).max().item<double>() : std::pow(column(0).pow(norm_type).sum().item<double>(), 1 / norm_type);
  if (!std::isfinite(norm)) {  // zeros, and NaN in place of other values than numbers
    (void)state.model.clip_grad_norm(0, norm_type);
    state.stage.mark();
    return norm;
  }
  constexpr double kEpsilon = 1e-6;  // clip_grad_norm_ adds this to the divisor
  if (const double limit = max_norm / (norm + kEpsilon); !(limit >= 1))
    (void)state.model.clip_grad_norm(limit * (own + kEpsilon), norm_type);
  state.stage.mark();
  return norm;
}

StateDict Pipeline::state_dict() {
  State& state = *state_;
  state.stage.check_usable();
  const OperationLabel label("Pipeline::state_dict()");
  state.check_steps();
  const bool gives = state.group.rank() % state.replicas == 0;
  c10::Dict<std::string, at::Tensor> own;
  if (gives)
    for (const auto& [name, tensor] : tensors_of(*state.layers.own)) own.insert(name, tensor.detach());
  StateDict result;
  const auto given = state.group.gather_object(own);
  for (const StageLayers::Known& known : state.layers.all) {
    if (given.empty()) break;
    const auto stage = static_cast<size_t>(known.stage * state.replicas);
    result.insert(known.name, given[stage].toGenericDict().at(known.name).toTensor().clone());
  }
  return result;
}

const Group* Pipeline::slice_holders() const { return &state_->group; }

StateDict Pipeline::state_in_slices() {
  State& state = *state_;
  state.check_steps();
  state.model.check_divergence();
  const auto stages = static_cast<size_t>(state.options.stages);
  std::vector<int64_t> bytes(stages, 0);
  std::vector<int64_t> begins;
  for (const StageLayers::Known& known : state.layers.all) {
    int64_t& of_stage = bytes[static_cast<size_t>(known.stage)];
    begins.push_back(of_stage);
    of_stage += bytes_of(known);
  }
  const int64_t slice = *std::max_element(bytes.begin(), bytes.end());
  const at::Tensor memory = sliced_zeros(slice, at::kByte, state.group.world_size(), state.group.rank());
  const NamedTensors own = tensors_of(*state.layers.own);
  StateDict result;
  for (size_t i = 0; i < state.layers.all.size(); ++i) {
    const StageLayers::Known& known = state.layers.all[i];
    const int64_t begin = slice * known.stage * state.replicas + begins[i];
    const at::Tensor whole = memory.slice(0, begin, begin + bytes_of(known)).view(known.dtype);
    result.insert(known.name, whole.slice(0, 0, c10::multiply_integers(known.sizes)).view(known.sizes));
  }
  if (state.group.rank() % state.replicas == 0)
    for (const auto& [name, tensor] : own) result[name].copy_(tensor.detach());
  return result;
}

std::vector<detail::ElementRange> Pipeline::elements_to_load(const StateDict& given) const {
  std::vector<detail::ElementRange> elements;
  for (const auto& [name, own] : tensors_of(*state_->layers.own))
    if (const at::Tensor* const tensor = given.find(name); tensor != nullptr && tensor->defined())
      elements.push_back({*tensor, 0, tensor->numel()});
  return elements;
}

void Pipeline::load_state_dict(const StateDict& given) {
  State& state = *state_;
  state.stage.check_usable();
  const OperationLabel label("Pipeline::load_state_dict()");
  std::string trouble;
  for (const StageLayers::Known& known : state.layers.all) {
    const at::Tensor* const tensor = given.find(known.name);
    if (tensor == nullptr || !tensor->defined())
      trouble += "\n  " + known.name + " is missing";
    else if (tensor->sizes() != known.sizes || tensor->scalar_type() != known.dtype)
      trouble += c10::str("\n  ", known.name, " is a ", tensor->toString(), " of ", tensor->sizes(), ", not a ",
                          c10::toString(known.dtype), " of ", known.sizes);
  }
  if (given.size() > state.layers.all.size() && trouble.empty()) trouble = "\n  it also has tensors of other layers";
  constexpr char kFits = '=';
  const auto troubles =
      state.group.all_gather_bytes(trouble.empty() ? kFits + std::to_string(sample_of_state(given)) : trouble);
  for (const std::string& one : troubles)
    if (one.front() != kFits)
      throw Error(ranks_with(troubles, one) + ": the state does not fit the layers of the Pipeline:" + one);
  for (const std::string& one : troubles)
    if (one != troubles.front())
      throw Error("Pipeline: load_state_dict() was given another state on " + ranks_with(troubles, one) + " than on " +
                  ranks_with(troubles, troubles.front()) + "; give every rank the same");
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : tensors_of(*state.layers.own)) tensor.copy_(given[name]);
  state.stage.mark();
}

}  // namespace lockstep
