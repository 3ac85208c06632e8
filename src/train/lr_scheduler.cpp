#include <lockstep/lr_scheduler.h>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <torch/optim.h>

#include <lockstep/error.h>

namespace lockstep {
namespace {

using torch::optim::OptimizerParamGroup;

void set_momentum(OptimizerParamGroup& group, double value) {
  auto& options = group.options();
  if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) return void(sgd->momentum(value));
  if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) return void(rmsprop->momentum(value));
  if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options))
    return void(adam->betas({value, std::get<1>(adam->betas())}));
  if (auto* adamw = dynamic_cast<torch::optim::AdamWOptions*>(&options))
    return void(adamw->betas({value, std::get<1>(adamw->betas())}));
  TORCH_CHECK(
      false,
      "the schedule varies the momentum, but this optimizer has none; for one_cycle_lr set cycle_momentum = false");
}

std::vector<double> rates_of(const torch::optim::Optimizer& optimizer) {
  std::vector<double> rates;
  for (const auto& group : optimizer.param_groups()) rates.push_back(group.options().get_lr());
  return rates;
}

c10::IValue entry(const c10::impl::GenericDict& state, const char* name) {
  const auto found = state.find(std::string(name));
  if (found == state.end()) throw Error("the state of the schedule has no `" + std::string(name) + "`");
  return found->value();
}

/// A list of numbers, as either language writes it.
std::vector<double> numbers_of(const c10::IValue& list) {
  if (!list.isList()) throw Error("the state of the schedule: `base_lrs` is not a list");
  std::vector<double> numbers;
  for (const c10::IValue& value : list.toListRef()) {
    if (!value.isDouble() && !value.isInt())
      throw Error("the state of the schedule: `base_lrs` is not a list of numbers");
    numbers.push_back(value.toScalar().toDouble());
  }
  return numbers;
}

}  // namespace

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : LRScheduler(optimizer, std::vector<Schedule>{std::move(schedule)}) {}

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules)
    : optimizer_(&optimizer), schedules_(std::move(schedules)), base_lrs_(rates_of(optimizer)) {
  TORCH_CHECK(schedules_.size() == 1 || schedules_.size() == base_lrs_.size(), "LRScheduler: ", schedules_.size(),
              " schedules for ", base_lrs_.size(), " parameter groups; pass one, or one per group");
  for (const Schedule& schedule : schedules_)
    TORCH_CHECK(schedule.rate, "LRScheduler: a schedule has no rate function");
  apply();
}

void LRScheduler::step() {
  ++steps_;
  apply();
}

void LRScheduler::apply() {
  auto& groups = optimizer_->param_groups();
  TORCH_CHECK(schedules_.size() == 1 || groups.size() == schedules_.size(), "the optimizer has ", groups.size(),
              " parameter groups now, the LRScheduler ", schedules_.size(), " schedules; make a new one");
  for (size_t i = base_lrs_.size(); i < groups.size(); ++i) base_lrs_.push_back(groups[i].options().get_lr());
  for (size_t i = 0; i < groups.size(); ++i) {
    const Schedule& schedule = schedules_[schedules_.size() == 1 ? 0 : i];
    groups[i].options().set_lr(schedule.rate(base_lrs_[i], steps_));
    const auto momentum = schedule.momentum ? schedule.momentum(steps_) : std::nullopt;
    if (momentum) set_momentum(groups[i], *momentum);
  }
}

std::vector<double> LRScheduler::get_last_lr() const { return rates_of(*optimizer_); }

c10::IValue LRScheduler::state_dict() const {
  c10::impl::GenericDict state(c10::AnyType::get(), c10::AnyType::get());
  const auto list = [](const std::vector<double>& numbers) {
    c10::impl::GenericList result(c10::AnyType::get());
    for (const double number : numbers) result.push_back(number);
    return result;
  };
  state.insert(std::string("last_epoch"), steps_);
  state.insert(std::string("_step_count"), steps_ + 1);
  state.insert(std::string("base_lrs"), list(base_lrs_));
  state.insert(std::string("_last_lr"), list(get_last_lr()));
  return state;
}

void LRScheduler::load_state_dict(const c10::IValue& state) {
  if (!state.isGenericDict()) throw Error("the state of a schedule must be a dictionary");
  const auto entries = state.toGenericDict();
  const c10::IValue steps = entry(entries, "last_epoch");
  if (!steps.isInt() || steps.toInt() < 0)
    throw Error("the state of the schedule: `last_epoch` is not a number of steps");
  const auto bases = numbers_of(entry(entries, "base_lrs"));
  if (bases.size() != optimizer_->param_groups().size())
    throw Error("the state of the schedule has " + std::to_string(bases.size()) + " parameter groups, the optimizer " +
                std::to_string(optimizer_->param_groups().size()));
  steps_ = steps.toInt();
  base_lrs_ = bases;
  apply();
}

}  // namespace lockstep
