#include "fully_sharded/state.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/error.h"
#include "base/loop_begin.h"
#include "base/state_in_use.h"
#include "base/text.h"
#include "collectives/group_state.h"
#include "fully_sharded/module_gradients.h"
#include "fully_sharded/part_gradients.h"
#include "fully_sharded/told_to_all.h"
#include "fully_sharded/unit.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "reducer/reduction_plan.h"

namespace lockstep {

using fully_sharded::Unit;
using What = fully_sharded::UseCheck::What;

namespace {

/// Throws on all ranks if the options differ or are invalid.
const Group& checked(const Group& group, const FullyShardedOptions& options) {
  TORCH_CHECK(several_virtual_ranks(group) == nullptr,
              "FullyShardedDataParallel: ranks that work for several virtual ranks are not supported; start as many "
              "ranks as virtual ranks");
  constexpr int kMostAhead = 8;
  const OperationLabel label("the options of a FullyShardedDataParallel");
  const std::string trouble = failure_of([&] {
    TORCH_CHECK(options.prefetch >= 0 && options.prefetch <= kMostAhead, "FullyShardedDataParallel: prefetch is ",
                options.prefetch, "; it must be from 0 to ", kMostAhead);
  });
  const std::string own = std::string("keep_gathered = ") + (options.keep_gathered ? "true" : "false") +
                          "\nprefetch = " + std::to_string(options.prefetch);
  const std::string difference = first_difference("option", fully_sharded::tell_all(group, trouble, own));
  if (!difference.empty())
    throw Error("the ranks make a FullyShardedDataParallel with different options: " + difference +
                ". Every rank must give the same options");
  return group;
}

std::shared_ptr<torch::nn::Module> checked(std::shared_ptr<torch::nn::Module> module) {
  TORCH_CHECK(module != nullptr,
              "FullyShardedDataParallel: the module is empty (nullptr, or a ModuleHolder made from it); construct it "
              "first");
  return module;
}

std::vector<std::string> names_of(const fully_sharded::FoundUnits& found) {
  std::vector<std::string> names;
  for (const auto& unit : found.units) names.push_back(unit.name);
  return names;
}

/// The groups of the ShardedInitialization that made units, or new ones.
std::shared_ptr<const fully_sharded::MachineGroups> groups_for(const fully_sharded::FoundUnits& found,
                                                               const Group& group) {
  const OperationLabel label("FullyShardedDataParallel()");
  std::shared_ptr<const fully_sharded::MachineGroups> groups;
  fully_sharded::on_all_ranks(group, [&] {
    for (const auto& unit : found.units) {
      const detail::EarlyUnit* early = unit.layer != nullptr ? unit.layer->early() : nullptr;
      if (early == nullptr) continue;
      TORCH_CHECK((!groups || groups == early->groups) && &state_of(early->groups->all()) == &state_of(group),
                  "FullyShardedDataParallel: ", unit.name,
                  " was made by another ShardedInitialization or for another group; make the whole model within one, "
                  "with the group that trains it");
      groups = early->groups;
    }
  });
  return groups ? groups : fully_sharded::MachineGroups::of(group);
}

void make(std::deque<Unit>& units, const fully_sharded::FoundUnits& found, const fully_sharded::MachineGroups& groups) {
  for (const auto& unit : found.units) {
    if (const auto early = unit.layer != nullptr ? unit.layer->take_early() : nullptr) {
      units.push_back(std::move(early->unit));
      units.back().rename(unit.name, unit.parameters);
    } else {
      units.emplace_back(unit.name, unit.parameters, groups,
                         /*stays_gathered=*/unit.layer == nullptr || groups.machines() == 1);
    }
  }
}

}  // namespace

FullySharded::State::State(std::shared_ptr<torch::nn::Module> module, const Group& group,
                           const FullyShardedOptions& options)
    : module_(checked(std::move(module))),
      found_(fully_sharded::find_units(*module_, checked(group, options))),
      groups_(groups_for(found_, group)),
      watch_(*groups_, ++state_of(group).replicas),
      check_(names_of(found_), group.rank(), state_of(group).replicas),
      edits_(module_, (make(units_, found_, *groups_), units_), check_.model()),
      gathering_(*groups_, units_, check_, options),
      gradients_(*groups_, units_, check_),
      uses_(units_.size()) {
  for (size_t number = 0; number < units_.size(); ++number) {
    const auto arrived = [this, number] {
      if (backward_.open != number) return;  // taken when that unit's backward ends, or refused
      telling("the backward of `" + units_[number].name() + '`', [&] { gradients_.take(number); });
    };
    for (Unit::Parameter& parameter : units_[number].parameters())
      alarms_.emplace_back(
          parameter.tensor, [this] { backward_begins(); }, arrived);
  }
  TensorMemory::release();  // former memory of the parameters
}

FullySharded::State::~State() { fully_sharded::hide_gradients(units_); }

void FullySharded::State::attach() {
  for (size_t number = 0; number < found_.units.size(); ++number)
    if (detail::UnitBase* layer = found_.units[number].layer) layer->attach(weak_from_this(), number);
}

void FullySharded::State::check_usable() const {
  TORCH_CHECK(backward_.phase != Phase::kFailed,
              "FullyShardedDataParallel: a backward failed halfway, so the ranks are no longer at the same place; "
              "start again from the last saved state");
  TORCH_CHECK(groups_->all().is_open(),
              "FullyShardedDataParallel: the Context of its group was destroyed; let the Context outlive the model");
}

void FullySharded::State::telling(const std::string& call, const std::function<void()>& body) {
  const CallPlace here(place(call));
  try {
    body();
  } catch (const std::exception& error) {
    const auto* misuse = dynamic_cast<const c10::Error*>(&error);
    // An engine reports it with the numbers of a machine or a rail, or as a broken connection.
    const std::string departed = misuse == nullptr ? watch_.departed() : "";
    const std::string text = departed.empty()
                                 ? misuse != nullptr ? misuse->what_without_backtrace() : error.what()
                                 : departed + ", while other ranks still call theirs, " + CallPlace::now().text +
                                       ". Every rank must run as many forwards and backwards: " + error.what();
    note_trouble(text);
    watch_.tell(backward_.trouble);
    if (!departed.empty()) throw Error(text);
    throw;
  }
}

void FullySharded::State::begins(size_t number) {
  check_usable();
  telling("the forward of `" + units_[number].name() + '`', [&] { use_in_forward(number); });
}

CallPlace::Call FullySharded::State::place(const std::string& call) const {
  const int passes = backward_.number - (backward_.phase == Phase::kBackward ? 1 : 0);
  return {call + " after " + std::to_string(passes) + (passes == 1 ? " backward" : " backwards") +
              (check_.model() > 1 ? " of model " + std::to_string(check_.model()) : ""),
          &watch_.caller()};
}

void FullySharded::State::use_in_forward(size_t number) {
  if (backward_.phase == Phase::kIdle) backward_.trouble.clear();
  TORCH_CHECK(backward_.phase != Phase::kBackward, "FullyShardedDataParallel: `", units_[number].name(),
              "` was called within a backward, as activation checkpointing does, which units do not support");
  const bool trains = at::GradMode::is_enabled();
  TORCH_CHECK(!trains || uses_[number].expired(), "FullyShardedDataParallel: `", units_[number].name(),
              "` was called a second time before the backward of the first call. Call it once in a forward, and run "
              "forwards without backward under torch::NoGradGuard");
  if (!units_[number].stays_gathered()) gathering_.use(number, What::kForward, /*learn=*/trains);
}

void FullySharded::State::returns(size_t number, const std::vector<at::Tensor>& outputs) {
  if (!at::GradMode::is_enabled()) return;
  const auto use = std::make_shared<Use>(Use{number, units_[number].changes()});
  for (const at::Tensor& output : outputs)
    if (output.requires_grad())
      output.register_hook([use, state = weak_from_this()](const at::Tensor&) {
        const auto here = state.lock();
        TORCH_CHECK(here,
                    "FullyShardedDataParallel: it was destroyed before the backward of a forward through its units");
        auto& own = static_cast<State&>(*here);
        own.telling("the backward of `" + own.units_[use->unit].name() + '`', [&] { own.backward_reaches(*use); });
      });
  uses_[number] = use;
}

void FullySharded::State::ends(size_t number) noexcept {
  if (!units_[number].stays_gathered()) gathering_.close(number);
}

void FullySharded::State::backward_begins() {
  if (backward_.phase == Phase::kBackward) return;
  check_usable();
  backward_.trouble = failure_of([this] {
    edits_.check_unchanged();
    TORCH_CHECK(
        steps_.expected,
        "FullyShardedDataParallel: no optimizer steps its parts; make a lockstep::ZeroRedundancyOptimizer of this "
        "model before the first backward. An optimizer of the module's parameters would change nothing");
  });
  note_trouble(fully_sharded::settle_gradients(units_));
  note_trouble(edits_.trouble_of_gradients("the next backward"));
  fully_sharded::hide_gradients(units_);
  gradients_.begin();
  gradients_.scaled().backward_begins();
  backward_.phase = Phase::kBackward;
  ++backward_.number;
  loop_begins();
  note_backward();
  at_end_of_outermost_backward(
      {.finished =
           [state = shared_from_this()] { state->telling("the end of a backward", [&] { state->backward_ended(); }); },
       .nested = [] {},
       .abandoned =
           [state = weak_from_this()] {
             const auto locked = state.lock();
             if (!locked) return;
             State& here = static_cast<State&>(*locked);
             here.backward_.phase = Phase::kFailed;
             here.note_trouble(
                 "FullyShardedDataParallel: an exception ended a backward halfway, and the other ranks wait for the "
                 "rest");
             here.watch_.tell(here.backward_.trouble);
           }});
}

void FullySharded::State::backward_reaches(Use& use) {
  backward_begins();
  if (use.backward == backward_.number) return;  // already seen, by another of its outputs
  TORCH_CHECK(use.backward == 0, "FullyShardedDataParallel: a backward went through `", units_[use.unit].name(),
              "` a second time (retain_graph); run one backward for each forward");
  TORCH_CHECK(use.changes == units_[use.unit].changes() || !backward_.trouble.empty(),
              "FullyShardedDataParallel: the parameters of `", units_[use.unit].name(),
              "` were changed between its forward and its backward, by step() or load_state_dict(), so the backward "
              "would use other values than the forward; run backward first");
  const at::NoGradGuard no_grad;
  use.backward = backward_.number;
  finish_open();
  backward_.open = use.unit;
  if (!units_[use.unit].stays_gathered()) gathering_.use(use.unit, What::kBackward, /*learn=*/true);
}

void FullySharded::State::note_trouble(const std::string& trouble) {
  if (backward_.trouble.empty()) backward_.trouble = trouble;
}

void FullySharded::State::finish_open() {
  if (!backward_.open) return;
  const size_t done = *std::exchange(backward_.open, std::nullopt);
  note_trouble(gradients_.add(done));
  if (!units_[done].stays_gathered()) gathering_.close(done);
  uses_[done].reset();
}

void FullySharded::State::backward_ended() {
  const at::NoGradGuard no_grad;
  finish_open();
  if (found_.units.back().layer == nullptr) note_trouble(gradients_.add(units_.size() - 1));
  for (const Unit& unit : units_)
    for (const Unit::Parameter& parameter : unit.parameters())
      if (parameter.tensor.grad().defined())
        note_trouble("FullyShardedDataParallel: a gradient of " + parameter.name +
                     " came from outside the backward of `" + unit.name() +
                     "`, for example from a sum over parameters that was computed before the model's forward. On one "
                     "machine, compute it after the forward; on several, where a unit's parameters have values only in "
                     "its own forward, compute it there; for an L2 norm, use the optimizer's weight_decay");
  backward_.phase = Phase::kFailed;
  gradients_.finish(backward_.trouble);
  fully_sharded::mark_gradients(units_);
  fully_sharded::show_gradients(units_);
  gradients_.scaled().backward_ended(current_backward());
  for (auto& use : uses_) use.reset();
  backward_.phase = Phase::kIdle;
  own_page().count_step();
}

}  // namespace lockstep
