#include <lockstep/fully_sharded_data_parallel.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <unordered_set>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/hash.h"
#include "base/text.h"
#include "checkpoint/state_hash.h"
#include "data_parallel/gradient_norm.h"
#include "fully_sharded/module_gradients.h"
#include "fully_sharded/part_step.h"
#include "fully_sharded/state.h"
#include "fully_sharded/told_to_all.h"
#include "rank_page/operation_label.h"

namespace lockstep {

using fully_sharded::tell_all;
using fully_sharded::Unit;

namespace {

void check_same_limits(const std::vector<std::string>& arguments) {
  const std::string difference = first_difference("argument", arguments);
  if (!difference.empty())
    throw Error("the ranks limit the norm differently: " + difference +
                ". Every rank must give the same arguments, and clear the same gradients");
}

}  // namespace

FullySharded::FullySharded(std::shared_ptr<torch::nn::Module> module, const Group& group,
                           const FullyShardedOptions& options)
    : state_(std::make_shared<State>(std::move(module), group, options)) {
  state_->attach();
}
FullySharded::~FullySharded() = default;

void FullySharded::before_forward() const { state_->check_usable(); }

std::vector<at::Tensor> FullySharded::parts() const {
  std::vector<at::Tensor> parts;
  for (const Unit::Parameter* parameter : state_->edits().trained()) parts.push_back(parameter->part);
  return parts;
}

std::vector<torch::optim::OptimizerParamGroup> FullySharded::parts_of(
    const std::vector<torch::optim::OptimizerParamGroup>& groups) const {
  std::unordered_set<const Unit::Parameter*> left;
  for (const Unit::Parameter* parameter : state_->edits().trained()) left.insert(parameter);
  std::vector<torch::optim::OptimizerParamGroup> result = groups;
  const OperationLabel label("the making of a ZeroRedundancyOptimizer");
  const CallPlace call(state_->place("the making of an optimizer"));
  fully_sharded::on_all_ranks(state_->groups()->all(), [&] {
    for (torch::optim::OptimizerParamGroup& group : result)
      for (at::Tensor& tensor : group.params()) {
        const Unit::Parameter& parameter = state_->edits().parameter_of(tensor);
        TORCH_CHECK(left.erase(&parameter) == 1, "FullyShardedDataParallel: ", parameter.name,
                    " is in the parameter groups twice, or requires no grad");
        tensor = parameter.part;
      }
    TORCH_CHECK(left.empty(), "FullyShardedDataParallel: parameter ", left.empty() ? "" : (*left.begin())->name,
                " is trained by the model and in none of the parameter groups; put all parameters that the model "
                "trains into groups");
  });
  return result;
}

std::unique_ptr<detail::Stepper> FullySharded::make_stepper(torch::optim::Optimizer& optimizer,
                                                            const detail::StepKind& kind,
                                                            const ZeroRedundancyOptions& options) const {
  const auto with_state = [state = std::weak_ptr<State>(state_)](auto event) {
    return [state, event] {
      const auto here = state.lock();
      TORCH_CHECK(here,
                  "FullyShardedDataParallel: the model whose parts this optimizer steps was destroyed; let it outlive "
                  "the optimizer");
      return event(*here);
    };
  };
  const OperationLabel label("the making of a ZeroRedundancyOptimizer");
  const CallPlace call(state_->place("the making of an optimizer"));
  std::shared_ptr<void> token;
  fully_sharded::on_all_ranks(state_->groups()->all(), [&] { token = state_->expect_steps(); });
  return std::make_unique<fully_sharded::PartStep>(
      state_->groups(), optimizer, kind, options,
      fully_sharded::PartStep::Events{[with_state] {
                                        std::string trouble;
                                        const auto look = with_state(
                                            [&](State& state) { trouble = state.trouble_of_gradients("step()"); });
                                        const std::string gone = failure_of(look);
                                        return gone.empty() ? trouble : gone;
                                      },
                                      with_state([](State& state) { state.after_step(); }),
                                      [state = std::weak_ptr<State>(state_)] {
                                        const auto here = state.lock();
                                        return here ? here->place("step()") : CallPlace::Call{.text = "step()"};
                                      },
                                      with_state([](State& state) { return state.edits().walk().lines; }), token},
      state_->contents().part_places());
}

double FullySharded::clip_grad_norm(double max_norm, double norm_type) {
  const at::NoGradGuard no_grad;
  const OperationLabel label("the norm of the gradients");
  const CallPlace call(state_->place("clip_grad_norm()"));
  std::string trouble = state_->trouble_of_gradients("clip_grad_norm()");
  if (trouble.empty() && (std::isnan(max_norm) || std::isnan(norm_type)))
    trouble = "FullyShardedDataParallel: clip_grad_norm() was given NaN";
  const std::vector<Unit::Parameter*>& trained = state_->edits().walk().trained;
  std::string arguments = "max_norm: " + decimal(max_norm) + "\nnorm_type: " + decimal(norm_type) + '\n';
  if (trouble.empty()) arguments += state_->edits().walk().lines;
  for (const Unit::Parameter* parameter : trained)
    arguments +=
        "the gradient of " + parameter->name + (parameter->part.grad().defined() ? " is there\n" : " was cleared\n");
  check_same_limits(tell_all(state_->groups()->all(), trouble, arguments));
  constexpr int64_t kBlock = GradientNorm::kBlock;
  GradientNorm norm(norm_type);
  int64_t blocks = 0;
  for (const Unit::Parameter* parameter : trained) blocks += GradientNorm::blocks_of(parameter->tensor.numel());
  const at::Tensor sums = at::zeros({blocks}, at::kDouble);
  auto* sum = sums.mutable_data_ptr<double>();
  for (const Unit::Parameter* parameter : trained) {
    if (const at::Tensor& gradient = parameter->part.grad(); gradient.defined() && gradient.numel() > 0) {
      const auto* elements = static_cast<const std::byte*>(gradient.const_data_ptr());
      for (int64_t at = parameter->begin; at < parameter->end; at += kBlock)
        sum[at / kBlock] = norm.of_block(gradient.scalar_type(),
                                         elements + static_cast<size_t>(at - parameter->begin) * gradient.itemsize(),
                                         std::min(parameter->end - at, kBlock));
    }
    sum += GradientNorm::blocks_of(parameter->tensor.numel());
  }
  state_->groups()->all().all_reduce(sums);  // each block comes from one rank, so adding changes nothing
  for (int64_t i = 0; i < blocks; ++i) norm.add(sums.const_data_ptr<double>()[i]);
  const double found = norm.norm(), factor = max_norm / (found + 1e-6);
  if (std::isnan(factor) || factor < 1)
    for (const Unit::Parameter* parameter : trained)
      if (at::Tensor gradient = parameter->part.grad(); gradient.defined()) gradient.mul_(factor);
  state_->accept_gradients();
  return found;
}

StateDict FullySharded::state_dict() {
  const OperationLabel label("the state_dict() of a FullyShardedDataParallel");
  const CallPlace call(state_->place("state_dict()"));
  state_->meet_before("state_dict()");
  StateDict state;
  state_->contents().read_all(
      [&](const std::string& name, const at::Tensor& value) { state.insert(name, value.clone()); });
  return state;
}

std::string FullySharded::hash() {
  const OperationLabel label("the hash() of a FullyShardedDataParallel");
  const CallPlace call(state_->place("hash()"));
  state_->meet_before("hash()");
  Hash hash;
  state_->contents().read_all(
      [&](const std::string& name, const at::Tensor& value) { add_to_hash(hash, name, value); });
  return state_->groups()->all().all_gather_bytes(hash.digits()).front();
}

const Group* FullySharded::slice_holders() const { return &state_->groups()->all(); }
StateDict FullySharded::state_in_slices() {
  const OperationLabel label("the state of a FullyShardedDataParallel");
  const CallPlace call(state_->place("the save"));
  state_->meet_before("saving");
  return state_->contents().in_slices();
}

std::vector<detail::ElementRange> FullySharded::elements_to_load(const StateDict& state) const {
  return state_->contents().elements_to_load(state);
}

void FullySharded::load_state_dict(const StateDict& state) {
  const OperationLabel label("load_state_dict() of a FullyShardedDataParallel");
  const CallPlace call(state_->place("load_state_dict()"));
  state_->check_between_backwards("load_state_dict()");
  tell_all(state_->groups()->all(), failure_of([this] { state_->check_usable(); }), "");
  state_->contents().load(state);
}

FullyShardedStats FullySharded::stats() const { return state_->stats(); }

std::shared_ptr<void> FullySharded::State::expect_steps() {
  TORCH_CHECK(steps_.token.expired(),
              "FullyShardedDataParallel: another optimizer already steps its parts; destroy that one before you make a "
              "new one");
  for (Unit& unit : units_)
    for (Unit::Parameter& parameter : unit.parameters()) parameter.stepped = parameter.tensor.requires_grad();
  auto token = std::make_shared<int>();
  steps_.token = token;
  steps_.expected = true;
  return token;
}

void FullySharded::State::check_between_backwards(const std::string& call) {
  telling(call, [&] {
    TORCH_CHECK(
        backward_.phase != Phase::kBackward && current_backward() == -1, "FullyShardedDataParallel: ", call,
        " was called within a backward, in which the other ranks wait for this one; call it after the backward");
  });
}

std::string FullySharded::State::trouble_before(const std::string& call) {
  check_between_backwards(call);
  std::string trouble = failure_of([&] {
    check_usable();
    edits_.check_module();
  });
  return trouble.empty() ? fully_sharded::settle_gradients(units_) : trouble;
}

void FullySharded::State::meet_before(const std::string& call) {
  const std::string intention = call + " of model " + std::to_string(check_.model()) + '\n';
  const std::string difference = first_difference("call", tell_all(groups_->all(), trouble_before(call), intention));
  if (!difference.empty())
    throw Error("the ranks use FullyShardedDataParallels in another order: " + difference +
                ". Every rank must call the same methods of the same models, in the same order");
}

std::string FullySharded::State::trouble_of_gradients(const std::string& call) {
  if (std::string trouble = trouble_before(call); !trouble.empty()) return trouble;
  if (std::string trouble = edits_.trouble_of_gradients(call); !trouble.empty()) return trouble;
  if (std::string trouble = edits_.trouble_of_unstepped(); !trouble.empty()) return trouble;
  return gradients_.scaled().trouble_before(call);
}

void FullySharded::State::after_step() {
  memory_.end_step();
  gathering_.forget();
  for (Unit& unit : units_) {
    if (unit.stays_gathered()) unit.gather_changes();
    for (const Unit::Parameter& parameter : unit.parameters())
      if (parameter.part.grad().defined()) parameter.tensor.unsafeGetTensorImpl()->bump_version();
    unit.remember();
  }
}

FullyShardedStats FullySharded::State::stats() const {
  FullyShardedStats stats{.gathers = gathering_.gathers(),
                          .sent_bytes = gathering_.bytes_sent() + gradients_.bytes_sent()};
  stats.gathered_bytes = gathering_.bytes();
  for (const Unit& unit : units_) {
    for (const Unit::Parameter& parameter : unit.parameters())
      stats.parameter_bytes += static_cast<int64_t>(parameter.tensor.numel() * parameter.tensor.itemsize());
    stats.part_bytes += unit.slice_bytes();
    if (unit.stays_gathered()) stats.gathered_bytes += unit.bytes();
  }
  return stats;
}

}  // namespace lockstep
