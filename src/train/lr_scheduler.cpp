#include <lockstep/lr_scheduler.h>

#include <cmath>
#include <map>

#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <torch/optim.h>

#include <lockstep/error.h>

#include "base/mutex.h"
#include "base/state_in_use.h"

namespace lockstep {
namespace {

using torch::optim::OptimizerParamGroup;

void set_momentum(OptimizerParamGroup& group, double value) {
  auto& options = group.options();
  if (auto* sgd = dynamic_cast<torch::optim::SGDOptions*>(&options)) return void(sgd->momentum(value));
  if (auto* rmsprop = dynamic_cast<torch::optim::RMSpropOptions*>(&options)) return void(rmsprop->momentum(value));
  if (auto* adam = dynamic_cast<torch::optim::AdamOptions*>(&options))
    return void(adam->betas({value, std::get<1>(adam->betas())}));
  auto& adamw = dynamic_cast<torch::optim::AdamWOptions&>(options);
  adamw.betas({value, std::get<1>(adamw.betas())});
}

/// The momentum that a schedule may vary, and the optimizer's option for it.
struct Momentum {
  double value = 0;
  const char* option = "";
  bool is_beta = false;
};

std::optional<Momentum> momentum_of(const OptimizerParamGroup& group) {
  const auto& options = group.options();
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options))
    return Momentum{sgd->momentum(), ".momentum(0.9)"};
  if (const auto* rmsprop = dynamic_cast<const torch::optim::RMSpropOptions*>(&options))
    return Momentum{rmsprop->momentum(), ".momentum(0.9)"};
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options))
    return Momentum{std::get<0>(adam->betas()), ".betas({0.9, 0.999})", true};
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options))
    return Momentum{std::get<0>(adamw->betas()), ".betas({0.9, 0.999})", true};
  return std::nullopt;
}

void check_has_momentum(const OptimizerParamGroup& group, size_t place) {
  const auto momentum = momentum_of(group);
  TORCH_CHECK(
      momentum,
      "the schedule varies the momentum, but this optimizer has none; for one_cycle_lr set cycle_momentum = false");
  TORCH_CHECK(momentum->value != 0, "the schedule varies the momentum, but group ", place,
              " of the optimizer was made without momentum and would start to use it; for one_cycle_lr set "
              "cycle_momentum = false, or make the optimizer with ",
              momentum->option);
}

/// Whether the schedule ever gives a momentum, judged by some of its steps.
bool varies_momentum(const Schedule& schedule) {
  constexpr int64_t kFarthest = int64_t{1} << 40;
  if (!schedule.momentum) return false;
  try {
    for (int64_t step = 0; step < kFarthest; step = 2 * step + 1)
      if (schedule.momentum(step)) return true;
  } catch (const std::exception&) {  // it has no such step
  }
  return false;
}

void check_rate(double rate, const char* what, size_t group, int64_t step) {
  TORCH_CHECK(std::isfinite(rate) && rate >= 0, "the ", what, " of group ", group, " of the optimizer is ", rate,
              " after ", step, step == 1 ? " step" : " steps",
              "; it must be finite and at least 0, so correct the schedule or the optimizer's options");
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

/// A list of numbers, as written by either language.
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

/// The right to set an optimizer's rates. The newest scheduler has it, and while it lives no older one may step.
struct LRScheduler::Claim {
  std::vector<double> base, set;  ///< rates by group

  /// The newest scheduler of each optimizer that has one.
  struct All {
    Mutex mutex;
    std::map<const torch::optim::Optimizer*, std::weak_ptr<Claim>> newest LOCKSTEP_GUARDED_BY(mutex);
  };
  static All& all() {
    static All claims;
    return claims;
  }

  /// For a new scheduler.
  static std::shared_ptr<Claim> make(const torch::optim::Optimizer& optimizer) {
    auto claim = std::make_shared<Claim>(Claim{.base = rates_of(optimizer), .set = {}});
    All& all = Claim::all();
    const MutexLock lock(all.mutex);
    std::erase_if(all.newest, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<Claim>& newest = all.newest[&optimizer];
    // A scheduler may outlive its optimizer until it is replaced, and the next optimizer may have the same address, but
    // it does not have the rates set by this scheduler.
    const std::shared_ptr<Claim> other = newest.lock();
    TORCH_CHECK(other == nullptr || other->set != claim->base || other->set == other->base,
                "LRScheduler: another LRScheduler has set the learning rates of this optimizer, and this one would "
                "take them for the rates that the optimizer was made with. Make one schedule of several by "
                "sequential_lr() or warm_up(), or destroy the other scheduler first");
    newest = claim;
    return claim;
  }

  /// Before the rates are set.
  static void check(const std::shared_ptr<Claim>& claim, const torch::optim::Optimizer& optimizer) {
    TORCH_CHECK(claim != nullptr, "this LRScheduler was moved from; use the object that it was moved to");
    All& all = Claim::all();
    const MutexLock lock(all.mutex);
    std::weak_ptr<Claim>& newest = all.newest[&optimizer];
    const std::shared_ptr<Claim> other = newest.lock();
    TORCH_CHECK(
        other == nullptr || other == claim,
        "LRScheduler: another LRScheduler was made for this optimizer later, and each would overwrite the "
        "rates of the other. Make one schedule of several by sequential_lr() or warm_up(), or destroy the other one");
    newest = claim;
  }
};

struct LRScheduler::Values {
  int64_t steps;
  std::vector<double> base_lrs, rates;
  std::vector<std::optional<double>> momenta;
};

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, Schedule schedule)
    : LRScheduler(optimizer, std::vector<Schedule>{std::move(schedule)}) {}

LRScheduler::LRScheduler(torch::optim::Optimizer& optimizer, std::vector<Schedule> schedules)
    : optimizer_(&optimizer), schedules_(std::move(schedules)), base_lrs_(rates_of(optimizer)) {
  TORCH_CHECK(schedules_.size() == 1 || schedules_.size() == base_lrs_.size(), "LRScheduler: ", schedules_.size(),
              " schedules for ", base_lrs_.size(), " parameter groups; pass one, or one per group");
  for (const Schedule& schedule : schedules_)
    TORCH_CHECK(schedule.rate, "LRScheduler: a schedule has no rate function");
  const auto& groups = optimizer.param_groups();
  for (size_t i = 0; i < groups.size(); ++i)
    if (varies_momentum(schedules_[schedules_.size() == 1 ? 0 : i])) check_has_momentum(groups[i], i);
  Values first = values_at(0, base_lrs_);
  claim_ = Claim::make(optimizer);
  apply(std::move(first));
}

void LRScheduler::step() {
  Claim::check(claim_, *optimizer_);
  note_in_use({.object = claim_.get(),
               .life = claim_,
               .name = "an LRScheduler that sets the learning rate",
               .line = "checkpointer.add(\"schedule\", scheduler)"});
  if (!optimizer_->state().empty()) note_optimizer_in_use(optimizer_, claim_);
  apply(values_at(steps_ + 1, base_lrs_));
}

std::vector<double> LRScheduler::next_lr() const {
  Claim::check(claim_, *optimizer_);
  return values_at(steps_ + 1, base_lrs_).rates;
}

/// Changes nothing, so that an error leaves the optimizer unchanged.
LRScheduler::Values LRScheduler::values_at(int64_t steps, std::vector<double> base_lrs) const {
  const auto& groups = optimizer_->param_groups();
  TORCH_CHECK(schedules_.size() == 1 || groups.size() == schedules_.size(), "the optimizer has ", groups.size(),
              " parameter groups now, the LRScheduler ", schedules_.size(), " schedules; make a new one");
  Values values{.steps = steps, .base_lrs = std::move(base_lrs), .rates = {}, .momenta = {}};
  for (size_t i = values.base_lrs.size(); i < groups.size(); ++i)
    values.base_lrs.push_back(groups[i].options().get_lr());
  for (size_t i = 0; i < groups.size(); ++i) {
    const Schedule& schedule = schedules_[schedules_.size() == 1 ? 0 : i];
    check_rate(values.base_lrs[i], "base learning rate", i, steps);
    values.rates.push_back(schedule.rate(values.base_lrs[i], steps));
    check_rate(values.rates.back(), "learning rate", i, steps);
    values.momenta.push_back(schedule.momentum ? schedule.momentum(steps) : std::nullopt);
    if (!values.momenta.back()) continue;
    if (i >= momentum_varied_.size() || !momentum_varied_[i]) check_has_momentum(groups[i], i);
    const double momentum = *values.momenta.back();
    TORCH_CHECK(std::isfinite(momentum) && momentum >= 0 && (momentum < 1 || !momentum_of(groups[i])->is_beta),
                "the momentum of group ", i, " of the optimizer is ", momentum, " after ", steps,
                steps == 1 ? " step" : " steps", "; it must be at least 0 and below 1, so correct the schedule");
  }
  return values;
}

void LRScheduler::apply(Values values) {
  auto& groups = optimizer_->param_groups();
  momentum_varied_.resize(groups.size());
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].options().set_lr(values.rates[i]);
    if (!values.momenta[i]) continue;
    set_momentum(groups[i], *values.momenta[i]);
    momentum_varied_[i] = true;
  }
  steps_ = values.steps;
  base_lrs_ = std::move(values.base_lrs);
  claim_->set = std::move(values.rates);
}

std::vector<double> LRScheduler::get_last_lr() const { return rates_of(*optimizer_); }

c10::IValue LRScheduler::state_dict() const {
  note_kept(claim_.get());
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
  for (size_t i = 0; i < bases.size(); ++i)
    if (!std::isfinite(bases[i]) || bases[i] < 0)
      throw Error("the state of the schedule: `base_lrs` has " + std::to_string(bases[i]) + " for group " +
                  std::to_string(i) + ", which is not a learning rate");
  Claim::check(claim_, *optimizer_);
  note_kept(claim_.get());
  apply(values_at(steps.toInt(), bases));
}

}  // namespace lockstep
