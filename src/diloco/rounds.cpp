#include "diloco/rounds.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "base/broadcast_notice.h"
#include "base/hash.h"
#include "base/weights_set.h"
#include "collectives/coalesced.h"
#include "collectives/machine_memory.h"
#include "collectives/storages.h"
#include "data_parallel/divergence.h"
#include "data_parallel/same_model.h"
#include "diloco/finite.h"
#include "diloco/island_entry.h"
#include "diloco/island_rounds.h"
#include "diloco/wire_format.h"
#include "rank_page/operation_label.h"
#include "reducer/reduction_plan.h"

namespace lockstep {
namespace {

using diloco::Condition;
using diloco::Exchange;
using diloco::Fragment;
using diloco::Outcome;
using diloco::OuterFragment;
using diloco::Place;
using diloco::Standing;

/// Lists the values that ranks compare, one per line.
std::string describe(const DiLoCoOptions& options) {
  std::ostringstream text;
  text.precision(15);
  text << "sync_every " << options.sync_every << "\nfragments " << options.fragments << "\noverlap_steps "
       << options.overlap_steps << "\nmixing " << options.mixing << "\nwire " << diloco::name_of(options.wire)
       << "\nerror_feedback " << options.error_feedback << "\nouter_lr " << options.outer_lr << "\nouter_momentum "
       << options.outer_momentum << "\nnesterov " << (options.nesterov && options.outer_momentum > 0)
       << "\nouter_optimizer " << (options.outer_optimizer ? "given" : "SGD") << '\n';
  return text.str();
}

/// Not part of describe(): a run may be resumed with another limit.
std::string max_nonfinite_line(const DiLoCoOptions& options) {
  return "max_nonfinite_rounds " + std::to_string(options.max_nonfinite_rounds) + '\n';
}

void check(const DiLoCoOptions& options, size_t parameters) {
  TORCH_CHECK(options.sync_every >= 1, "DiLoCoOptions: sync_every is ", options.sync_every,
              "; it is a number of steps, at least 1");
  TORCH_CHECK(options.fragments >= 1 && options.fragments <= static_cast<int64_t>(parameters),
              "DiLoCoOptions: fragments is ", options.fragments,
              "; it must be from 1 to the number of parameters that "
              "require grad, ",
              parameters);
  TORCH_CHECK(options.overlap_steps >= 0 && options.overlap_steps < options.sync_every,
              "DiLoCoOptions: overlap_steps is ", options.overlap_steps,
              "; it must be at least 0 and below sync_every, ", options.sync_every,
              ", because a fragment's result must arrive before its next turn");
  TORCH_CHECK(options.mixing >= 0 && options.mixing <= 1, "DiLoCoOptions: mixing is ", options.mixing,
              "; it must be from 0 to 1");
  TORCH_CHECK(std::isfinite(options.outer_lr) && options.outer_lr > 0, "DiLoCoOptions: outer_lr is ", options.outer_lr,
              "; it must be above 0 and finite");
  TORCH_CHECK(options.outer_momentum >= 0 && options.outer_momentum < 1, "DiLoCoOptions: outer_momentum is ",
              options.outer_momentum, "; it must be at least 0 and below 1");
  TORCH_CHECK(options.max_nonfinite_rounds >= 1, "DiLoCoOptions: max_nonfinite_rounds is ",
              options.max_nonfinite_rounds, "; it is a number of rounds, at least 1");
}

void check(const NamedTensors& parameters) {
  for (const auto& [name, tensor] : parameters) {
    const at::ScalarType dtype = tensor.scalar_type();
    TORCH_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "DiLoCo: parameter ", name, " is ",
                dtype, "; its outer copy is float, so parameters must be float, bfloat16 or float16");
  }
}

/// The fragments' parameters, after all ranks have been found to give the same options and model.
std::vector<std::vector<size_t>> checked_fragments(const Group& group, const ReplicaState& model,
                                                   const DiLoCoOptions& options) {
  const OperationLabel label("making a DiLoCo");
  const bool is_claimed = diloco::Claim::exists(model.alive.get());
  check_same_on_all_ranks(group, "option",
                          describe(options) + max_nonfinite_line(options) +
                              (is_claimed ? "a model that has a DiLoCo" : "a model without one") + '\n');
  TORCH_CHECK(
      !is_claimed,
      "DiLoCo: the model already has a DiLoCo, and both would move its parameters; destroy the other one first");
  NamedTensors all;
  for (const auto& one : model.attached.known()) all.emplace_back(one.name, one.tensor);
  const auto no_remark = [](const at::Tensor&) { return std::string(); };
  check_same_on_all_ranks(group, "parameter", all, no_remark, "it is given to a DiLoCo");
  check_same_on_all_ranks(group, "buffer", model.attached.buffers(), no_remark, "it is given to a DiLoCo");
  TORCH_CHECK(!several_virtual_ranks(model.group),
              "DiLoCo: ranks work for several virtual ranks, whose results must not depend on the machines; start the "
              "run without virtual ranks");
  const NamedTensors& trained = model.attached.trained();
  check(options, trained.size());
  check(trained);
  std::vector<int64_t> sizes;
  for (const auto& [name, tensor] : trained) sizes.push_back(tensor.numel());
  return diloco::fragments_of(sizes, options.fragments);
}

std::vector<std::string> names_of(const NamedTensors& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

std::optional<int> own_island() {
  const auto place = diloco::HubPlace::of_environment();
  return place ? std::optional(place->island) : std::nullopt;
}

std::string optimizers_of(const std::vector<OuterFragment>& fragments) {
  std::string optimizers;
  for (const OuterFragment& fragment : fragments) optimizers += fragment.describe() + '\n';
  return optimizers;
}

bool any(const std::vector<bool>& flags) { return std::find(flags.begin(), flags.end(), true) != flags.end(); }

}  // namespace

DiLoCo::State::State(Replica& of, const Group& group, DiLoCoOptions given)
    : model_(state_of(of)),
      held_{.is_alive = model_.alive,
            .claim = {},
            .attachments = model_.attachments,
            .left_out = outer_copies_left_out().times},
      options_(std::move(given)),
      names_(names_of(model_.attached.trained())),
      fragment_parameters_(checked_fragments(group, model_, options_)),
      machines_(group, model_.group, own_island()),
      fragments_(make_fragments()),
      frozen_(fragments_.size()) {
  diloco::check_made(group, fragments_);
  check_same_on_all_ranks(group, "option", optimizers_of(fragments_));
  agreed_ = describe(options_) + max_nonfinite_line(options_) + optimizers_of(fragments_);
  // The address stays the model's own while there is a weak pointer to it.
  held_.claim.emplace(model_.alive.get());
  islands_ = diloco::Islands::of_environment(machines_.here(),
                                             {options_.sync_every, options_.fragments, options_.overlap_steps});
  if (islands_) IslandEntry(*this).check();
  stats.rounds_by_machine.assign(static_cast<size_t>(islands_ ? islands_->count() : machines_.count()), 0);

  SetTensors set;
  for (const auto& one : model_.attached.known()) set.insert(one.tensor.unsafeGetTensorImpl());
  if (const auto equal = others(); !equal.empty() && group.world_size() > 1)
    broadcast_weights(group, equal, /*root=*/0);
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment) write(fragment, /*keep=*/0);
  notify_broadcast(set);
}

std::vector<at::Tensor> DiLoCo::State::others() const {
  std::vector<at::Tensor> others;
  for (const auto& one : model_.attached.known())
    if (!one.followed) others.push_back(one.tensor);
  for (const auto& [name, buffer] : model_.attached.buffers()) others.push_back(buffer);
  return others;
}

std::vector<OuterFragment> DiLoCo::State::make_fragments() {
  std::vector<OuterFragment> made;
  for (const auto& places : fragment_parameters_) {
    std::vector<at::Tensor> parameters;
    for (const size_t place : places) parameters.push_back(model_.attached.trained()[place].second);
    made.emplace_back(Fragment(std::move(parameters)), machines_, options_);
  }
  return made;
}

void DiLoCo::State::check_usable() const {
  TORCH_CHECK(!held_.is_alive.expired(),
              "DiLoCo: its model was destroyed; let the DistributedDataParallel outlive the DiLoCo");
  if (!problem_.empty()) throw Error(problem_);
  if (const auto left_out = outer_copies_left_out(); left_out.times != held_.left_out)
    throw Error(
        "DiLoCo: weights were resumed from a checkpoint, but its part `" + left_out.last +
        "`, a DiLoCo's state, was not, and this DiLoCo has the outer copy of other weights: the next round would "
        "undo the training. Add the DiLoCo to the Checkpointer under that name before resume(), or make it after "
        "resume(), to begin with a new outer copy");
  if (!any_borrowed()) return;
  for (const OuterFragment& fragment : fragments_)
    for (const void* storage : storages_of(fragment.fragment().parameters()))
      TORCH_CHECK(!is_borrowed(storage),
                  "DiLoCo: the model has averaged weights; destroy the guard of averaged_weights() first");
}

void DiLoCo::State::note_frozen() {
  for (size_t which = 0; which < fragments_.size(); ++which) {
    const auto& parameters = fragments_[which].fragment().parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      if (!parameters[i].requires_grad()) frozen_[which] = static_cast<int32_t>(fragment_parameters_[which][i]);
  }
}

std::string DiLoCo::State::described() const { return describe(options_) + fragments_.front().kind_of_optimizer(); }

Standing DiLoCo::State::agree(size_t which, const at::Tensor& values) const {
  const at::NoGradGuard no_grad;
  Standing mine;
  if (values.defined() && !at::isfinite(values).all().item<bool>()) mine = {Condition::kNotFinite};
  uint64_t hash = Hash::kStart;
  const auto& parameters = fragments_[which].fragment().parameters();
  if (machines_.here().world_size() > 1)
    for (const at::Tensor& parameter : parameters) hash = Hash::mixed(hash, hash_of(parameter));
  if (frozen_[which]) mine = {Condition::kFrozen, *frozen_[which]};
  if (model_.attachments != held_.attachments) mine = {Condition::kRefreshed};
  const OperationLabel label("a round of DiLoCo");
  const int64_t words[] = {stats.steps, static_cast<int64_t>(mine.condition), static_cast<int64_t>(mine.detail),
                           static_cast<int64_t>(hash), static_cast<int64_t>(fragments_[which].hash())};
  const at::Tensor all = machines_.here().all_gather(at::tensor(c10::ArrayRef<int64_t>(words), at::kLong));
  Standing worst;
  uint64_t outer = Hash::kStart;  // every rail must have the same outcome
  int other = 0;                  // a rank whose parameters are not the first one's
  for (int rank = 0; rank < machines_.here().world_size(); ++rank) {
    const auto* told = all.const_data_ptr<int64_t>() + std::ssize(words) * rank;
    if (told[0] != *all.const_data_ptr<int64_t>()) return {Condition::kOutOfStep};
    const auto condition = static_cast<Condition>(told[1]);
    if (condition > worst.condition) worst = {condition, static_cast<int32_t>(told[2])};
    if (other == 0 && told[3] != all.const_data_ptr<int64_t>()[3]) other = rank;
    if (rank < machines_.slices()) outer = Hash::mixed(outer, static_cast<uint64_t>(told[4]));
  }
  worst.outer = outer;
  // One that is not finite goes on from the outer copy, as its whole machine does.
  if (worst.condition == Condition::kTakesPart && other != 0)
    return {Condition::kDiverged, machines_.number_of(other), outer};
  return worst;
}

DiLoCo::State::Round DiLoCo::State::begin(size_t which) {
  OuterFragment& fragment = fragments_[which];
  const at::Tensor values = fragment.pseudo_gradient(machines_);
  const Standing standing = agree(which, values);
  Round round{which, stats.steps, std::nullopt};
  if (machines_.owns_slice()) {
    round.exchange.emplace(machines_, options_.wire, Place{stats.steps, static_cast<int64_t>(which), &names_}, standing,
                           values, fragment.rest());
    stats.bytes_sent += round.exchange->bytes_sent();
  }
  fragment.set_sent_at(stats.steps);
  if (standing.condition == Condition::kNotFinite)
    for (size_t each = 0; each < fragments_.size(); ++each) write(each, /*keep=*/0);
  return round;
}

void DiLoCo::State::continue_round(Round& round) {
  if (!round.exchange) return;
  const auto start = std::chrono::steady_clock::now();
  const int64_t before = round.exchange->bytes_sent();
  round.exchange->send_means(machines_, fragments_[round.fragment].mean_rest());
  stats.bytes_sent += round.exchange->bytes_sent() - before;
  stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Outcome DiLoCo::State::outcome_of(Round& round) {
  continue_round(round);
  if (round.exchange) {
    const auto start = std::chrono::steady_clock::now();
    round.exchange->finish(machines_, fragments_[round.fragment].mean_rest());
    stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return diloco::shared(machines_, round.exchange ? std::optional(round.exchange->outcome()) : std::nullopt);
}

void DiLoCo::State::count(const Outcome& outcome, int64_t sent_at) {
  ++stats.rounds;
  stats.took_part = outcome.took_part;
  for (int machine = 0; machine < machines_.count(); ++machine) {
    if (outcome.took_part[static_cast<size_t>(machine)])
      ++stats.rounds_by_machine[static_cast<size_t>(machine)];
    else
      machines_.warn_of(machine, "was left out of the round of step " + std::to_string(sent_at) +
                                     ": its parameters were not finite; it continues from the outer copy");
  }
}

void DiLoCo::State::end_round(Round& round, double keep) {
  const Outcome outcome = outcome_of(round);
  if (!outcome.error.empty()) throw Error(outcome.error);
  count(outcome, round.sent_at);
  problem_ = empty_rounds_.note(round.fragment, stats.rounds, !any(outcome.took_part), options_.max_nonfinite_rounds);
  if (!problem_.empty()) throw Error(problem_);
  if (!any(outcome.took_part)) return;
  if (round.exchange) fragments_[round.fragment].step(round.exchange->mean());
  write(round.fragment, keep);
}

void DiLoCo::State::write(size_t which, double keep) {
  const at::NoGradGuard no_grad;
  const OuterFragment& fragment = fragments_[which];
  const auto& parameters = fragment.fragment().parameters();
  const at::Tensor outer = fragment.whole(machines_);
  if (const auto bad = diloco::first_not_finite(parameters, outer)) {
    problem_ = diloco::outer_problem(names_[fragment_parameters_[which][*bad]], stats.steps, options_, machines_);
    throw Error(problem_);
  }
  fragment.fragment().write(outer, keep, /*writes_shared=*/machines_.here().rank() == 0);
  if (std::any_of(parameters.begin(), parameters.end(), [](const auto& one) { return is_owned_together(one); }))
    machines_.here().barrier();
  note_weights_set(storages_of(parameters));
}

bool DiLoCo::State::step() {
  check_usable();
  note_frozen();
  if (islands_) return AmongIslands(*this).step();
  const int64_t now = ++stats.steps;
  bool has_set = false;
  for (Round& round : under_way_)
    if (now == round.sent_at + options_.overlap_steps / 2) continue_round(round);
  while (!under_way_.empty() && under_way_.front().sent_at + options_.overlap_steps <= now) {
    Round round = std::move(under_way_.front());
    under_way_.pop_front();
    end_round(round, options_.mixing);
    has_set = true;
  }
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment) {
    const int64_t offset = static_cast<int64_t>(fragment) * options_.sync_every / options_.fragments;
    if ((now + offset) % options_.sync_every != 0) continue;
    under_way_.push_back(begin(fragment));
    if (options_.overlap_steps > 0) continue;
    Round round = std::move(under_way_.back());
    under_way_.pop_back();
    end_round(round, /*keep=*/0);
    has_set = true;
  }
  return has_set;
}

void DiLoCo::State::finish(bool leaves) {
  check_usable();
  note_frozen();
  if (islands_) return AmongIslands(*this).finish(leaves);
  uint64_t rounds = under_way_.size();
  for (const OuterFragment& fragment : fragments_)
    rounds = Hash::mixed(rounds, static_cast<uint64_t>(fragment.sent_at()));
  diloco::check_together(machines_, {stats.steps, Place::kFinish, &names_}, rounds);
  while (!under_way_.empty()) {
    Round round = std::move(under_way_.front());
    under_way_.pop_front();
    // Nothing was trained since it was sent in this step.
    end_round(round, round.sent_at == stats.steps ? 0 : options_.mixing);
  }
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment) {
    if (fragments_[fragment].sent_at() == stats.steps) continue;
    Round round = begin(fragment);
    end_round(round, /*keep=*/0);
  }
  if (model_.options.buffers != BufferPolicy::kNone)
    diloco::average_finite_buffers(machines_, model_.attached.buffers());
}

void DiLoCo::State::warn_unless_finished() const {
  int64_t last_round = stats.steps;
  for (const OuterFragment& fragment : fragments_) last_round = std::min(last_round, fragment.sent_at());
  const bool is_alone = islands_ ? islands_->count() == 1 || islands_->has_left() : machines_.count() == 1;
  if (is_alone || machines_.here().rank() != 0 || saved_at_ == stats.steps) return;
  const bool is_under_way = !under_way_.empty() || (islands_ && !islands_->turns.under_way.empty());
  if (last_round == stats.steps && !is_under_way) return;
  last_round = std::max<int64_t>(last_round, 0);  // -1: it has missed its last round
  TORCH_WARN("DiLoCo: destroyed ", stats.steps - last_round, " steps after the last round of a part of the model",
             is_under_way ? ", with rounds under way" : "",
             ", so the machines have different parameters; call finish() before you use the model");
}

}  // namespace lockstep
