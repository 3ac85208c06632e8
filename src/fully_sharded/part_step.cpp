#include "fully_sharded/part_step.h"

#include <sstream>
#include <typeinfo>

#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>

#include "base/error.h"
#include "base/first_difference.h"
#include "optim/step_plan.h"
#include "rank_page/operation_label.h"

namespace lockstep::fully_sharded {
namespace {

std::string text_of(const optim::StepConstants& constants) {
  std::ostringstream text;
  text << std::hexfloat;
  for (const double value : {constants.weight_decay, constants.decay, constants.step_size, constants.momentum,
                             constants.dampened, constants.beta2, constants.root, constants.eps})
    text << ' ' << value;
  return text.str();
}

std::unique_ptr<detail::Stepper> make_own(torch::optim::Optimizer& optimizer, const detail::StepKind& kind,
                                          const ZeroRedundancyOptions& options) {
  TORCH_CHECK(kind.formula != detail::FormulaKind::kNone,
              "FullyShardedDataParallel: its parts are stepped by SGD, Adam and AdamW, and this optimizer is a ",
              c10::demangle(typeid(optimizer).name()), "; take one of those");
  TORCH_CHECK(
      !options.master_weights,
      "FullyShardedDataParallel: master_weights is for parameters of 16 bits, which it does not take yet; leave "
      "it false");
  return detail::make_stepper(static_cast<const Replica*>(nullptr), optimizer, kind, options);
}

}  // namespace

PartStep::PartStep(std::shared_ptr<const MachineGroups> groups, torch::optim::Optimizer& optimizer,
                   const detail::StepKind& kind, const ZeroRedundancyOptions& options, Events events,
                   PartStates::Places places)
    : group_(groups->all()),
      formula_(kind.formula),
      optimizer_(&optimizer),
      own_(make_own(optimizer, kind, options)),
      events_(std::move(events)),
      states_(std::move(places), std::move(groups), formula_of(formula_)) {
  check_same("option", "optimizer " + c10::demangle(typeid(optimizer).name()) + '\n');
}

void PartStep::move_to(torch::optim::Optimizer& optimizer) {
  optimizer_ = &optimizer;
  own_->move_to(optimizer);
}

void PartStep::complete_state() {
  TORCH_CHECK(false,
              "FullyShardedDataParallel: each rank has the optimizer's state of its parts only, and no rank may have "
              "room for all of it; save it by a Checkpointer: checkpointer.add(\"optimizer\", optimizer)");
}

void PartStep::agree() const {
  const OperationLabel label("an optimizer's step");
  std::string lines;
  size_t number = 0;
  for (const optim::Intent& intent : optim::intents_of(*optimizer_, formula_of(formula_),
                                                       [](const at::Tensor& part) { return part.grad().defined(); }))
    lines += "stepped parameter " + std::to_string(number++) + ", algorithm " +
             std::to_string(static_cast<int>(intent.algorithm)) + ", constants" + text_of(intent.constants) + '\n';
  const std::string model = events_.describe();
  check_same("step", lines + model);
  if (const size_t edit = model.find(kEdited); edit != std::string::npos)
    throw Error("FullyShardedDataParallel: the module has been edited since it was made: it has " +
                model.substr(edit + kEdited.size(), model.find('\n', edit) - edit - kEdited.size()) +
                ". Layers and parameters cannot be added or replaced yet");
}

void PartStep::check_same(const std::string& kind, const std::string& lines) const {
  const std::string difference = first_difference(kind, group_.all_gather_bytes(lines));
  if (difference.empty()) return;
  throw Error("the ranks are about to take different steps of a FullyShardedDataParallel: " + difference +
              ". Every rank calls step() after the same backward passes, with the same options");
}

void PartStep::step() {
  const at::NoGradGuard no_grad;
  agree();
  events_.before();
  states_.flatten(*optimizer_);
  own_->step();
  events_.after();
}

}  // namespace lockstep::fully_sharded
