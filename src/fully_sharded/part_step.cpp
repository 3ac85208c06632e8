#include "fully_sharded/part_step.h"

#include <optional>
#include <tuple>
#include <typeinfo>
#include <unordered_map>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include "base/error.h"
#include "base/state_in_use.h"
#include "base/text.h"
#include "checkpoint/sliced_memory.h"
#include "fully_sharded/told_to_all.h"
#include "optim/local_step.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::fully_sharded {
namespace {

constexpr const char* kMaking = "the making of a ZeroRedundancyOptimizer";

/// The numbers with which parameters are stepped, from `name` on, each on a line with the options that it comes from.
std::string numbers_of(const std::string& name, double lr, const optim::Intent& intent) {
  const optim::StepConstants& of = intent.constants;
  const bool is_adam = optim::state_arrays(intent.algorithm) >= 2;
  std::vector<std::pair<const char*, double>> numbers{{"lr", lr}, {"weight_decay", of.weight_decay}};
  if (is_adam)
    numbers.insert(numbers.end(), {{"beta1", of.momentum},
                                   {"beta2", of.beta2},
                                   {"eps", of.eps},
                                   {"1 - lr * weight_decay", of.decay},
                                   {"lr / (1 - beta1 ^ steps)", of.step_size},
                                   {"sqrt(1 - beta2 ^ steps)", of.root}});
  else
    numbers.insert(numbers.end(), {{"momentum", of.momentum}, {"1 - dampening", of.dampened}});
  std::string lines;
  for (const auto& [option, value] : numbers) lines += option + (" of " + name) + ": " + decimal(value) + '\n';
  return lines + "algorithm of " + name + ": " + std::to_string(static_cast<int>(intent.algorithm)) + '\n';
}

std::unique_ptr<detail::Stepper> make_own(const Group& group, torch::optim::Optimizer& optimizer,
                                          const detail::StepKind& kind, const ZeroRedundancyOptions& options,
                                          detail::StateZeros zeros) {
  const OperationLabel label(kMaking);
  on_all_ranks(group, [&] {
    TORCH_CHECK(kind.formula != detail::FormulaKind::kNone,
                "FullyShardedDataParallel: SGD, Adam and AdamW can step its parts, and this optimizer is a ",
                c10::demangle(typeid(optimizer).name()), "; use one of those");
  });
  const std::vector<std::string> folders =
      group.all_gather_bytes(failure_of([&] { check_state_folder(options.state_folder); }));
  if (std::string trouble = first_trouble(folders); !trouble.empty()) throw StorageError(trouble);
  return detail::make_local_stepper(optimizer, kind, options, std::move(zeros));
}

}  // namespace

PartStep::PartStep(std::shared_ptr<const MachineGroups> groups, torch::optim::Optimizer& optimizer,
                   const detail::StepKind& kind, const ZeroRedundancyOptions& options, Events events,
                   PartStates::Places places)
    : group_(groups->all()),
      formula_(kind.formula),
      optimizer_(&optimizer),
      own_(make_own(group_, optimizer, kind, options,
                    [this](const at::Tensor& part, int array, at::ScalarType dtype) {
                      return states_.zeros(part, array, dtype);
                    })),
      events_(std::move(events)),
      states_(std::move(places), std::move(groups), formula_of(formula_), options) {
  const OperationLabel label(kMaking);
  const char* const state = options.state_folder.empty() ? "in memory" : "in files of a state_folder";
  refuse_difference(
      "option", group_.all_gather_bytes("optimizer " + c10::demangle(typeid(optimizer).name()) + "\nstate " + state +
                                        "\nmaster_weights " + (options.master_weights ? "1\n" : "0\n")));
}

void PartStep::move_to(torch::optim::Optimizer& optimizer) {
  optimizer_ = &optimizer;
  own_->move_to(optimizer);
}

void PartStep::complete_state() {
  TORCH_CHECK(false,
              "FullyShardedDataParallel: each rank has the optimizer's state of its own parts only, and a rank may "
              "have no room for all of it; save it with a Checkpointer: checkpointer.add(\"optimizer\", optimizer)");
}

std::string PartStep::trouble() const {
  for (const auto& group : optimizer_->param_groups())
    for (const at::Tensor& part : group.params())
      if (!states_.has(part))
        return c10::str("FullyShardedDataParallel: the optimizer has a tensor of ", part.sizes(),
                        " that is not part of the model, as after add_param_group(); give all parameter groups to the "
                        "constructor of the optimizer");
  return events_.trouble();
}

std::string PartStep::intended() const {
  std::unordered_map<const c10::TensorImpl*, double> rates;
  std::string lines;
  for (const auto& group : optimizer_->param_groups())
    for (const at::Tensor& part : group.params()) {
      rates[part.unsafeGetTensorImpl()] = group.options().get_lr();
      // First, so that ranks that differ in this report it, whatever follows from it.
      lines += "the gradient of " + states_.name_of(part) + (part.grad().defined() ? " is there\n" : " was cleared\n");
    }
  std::optional<std::tuple<double, optim::Algorithm, optim::StepConstants>> last;
  for (const optim::Intent& intent : optim::intents_of(*optimizer_, formula_of(formula_),
                                                       [](const at::Tensor& part) { return part.grad().defined(); })) {
    const std::string& name = states_.name_of(intent.parameter);
    const double lr = rates.at(intent.parameter.unsafeGetTensorImpl());
    const std::tuple now{lr, intent.algorithm, intent.constants};
    if (std::exchange(last, now) != now) lines += numbers_of(name, lr, intent);
  }
  return lines;
}

void PartStep::agree() {
  const OperationLabel label("an optimizer's step");
  std::string trouble = this->trouble();
  bool has_room = true;
  if (trouble.empty()) {
    trouble = failure_of([&] { states_.reserve(*optimizer_); });
    has_room = trouble.empty();
  }
  const std::string model = trouble.empty() ? events_.describe() : "";
  try {
    refuse_difference("step", tell_all(group_, trouble, trouble.empty() ? intended() + model : ""));
  } catch (const Error& error) {
    if (has_room) throw;
    throw StorageError(error.what());  // so that the launcher reports its kind
  }
}

void PartStep::refuse_difference(const std::string& kind, const std::vector<std::string>& said) {
  const std::string difference = first_difference(kind, said);
  if (difference.empty()) return;
  throw Error("the ranks are about to take different steps of a FullyShardedDataParallel: " + difference +
              ". Every rank must call step() after the same backward passes, with the same options");
}

void PartStep::step() {
  const at::NoGradGuard no_grad;
  const CallPlace call(events_.place());
  agree();
  states_.flatten(*optimizer_);
  own_->step();
  note_optimizer_in_use(optimizer_, events_.token);
  events_.after();
}

}  // namespace lockstep::fully_sharded
