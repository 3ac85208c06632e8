#include <algorithm>
#include <cstring>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

#include "base/weights_set.h"
#include "diloco/island_rounds.h"
#include "diloco/rounds.h"

// A state has "step", "place" [machine, machines, slice or -1, slices], "machines" (Machines::layout()), "options"
// (text), "sizes" and "fragment_of"
// [parameters], "frozen" [fragments] (the place of a parameter that a step of this rank saw frozen, or -1),
// "fragment.<f>.<name>" (OuterFragment::state_dict()), "rounds_under_way", and of each of these
// "under_way.<n>.fragment", ".sent_at", ".took_part" [machines] and, if there is one, ".mean" [slice]. Of a machine of
// --islands also "island", "island_round", the last one in the outer copies, and if fragments take turns or overlap
// "island_turn", the step of the next one, and "island_under_way" [n, 3]: round, fragment and step of those whose means
// are in the outer copies, and whose parameters are not set.

namespace lockstep {
namespace {

using diloco::Exchange;
using diloco::Outcome;
using diloco::OuterFragment;

int64_t number(const StateDict& state, const std::string& name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr || found->numel() != 1) throw Error("the state of DiLoCo has no number `" + name + "`");
  return found->item<int64_t>();
}

void insert_number(StateDict& state, const std::string& name, int64_t value) {
  state.insert(name, at::scalar_tensor(value, at::kLong));
}

at::Tensor tensor_of_text(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

/// Throws Error if a state was saved with other options than `own`, which has one a line.
void check_options(const StateDict& state, const std::string& own) {
  const at::Tensor* found = state.find("options");
  if (found == nullptr || found->scalar_type() != at::kByte) throw Error("the state of DiLoCo has no `options`");
  const at::Tensor bytes = found->contiguous();
  std::istringstream saved({static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())});
  std::istringstream given(own);
  for (std::string theirs, mine; std::getline(given, mine);) {
    if (!std::getline(saved, theirs)) theirs = "nothing";
    if (theirs != mine)
      throw Error("the state of DiLoCo was saved with `" + theirs + "`, and this one has `" + mine +
                  "`; make the DiLoCo with the options of the run that saved it");
  }
}

std::string fragment_name(size_t fragment) { return "fragment." + std::to_string(fragment) + "."; }
std::string round_name(size_t round) { return "under_way." + std::to_string(round) + "."; }

std::vector<int64_t> numbers(const StateDict& state, const std::string& name) {
  const at::Tensor* found = state.find(name);
  if (found == nullptr || found->scalar_type() != at::kLong) throw Error("the state of DiLoCo has no `" + name + "`");
  const at::Tensor flat = found->contiguous();
  return {flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()};
}

/// Of each fragment, the place of a parameter that a step saw frozen, as numbers: -1 if there is none.
using Frozen = std::vector<std::optional<int32_t>>;
at::Tensor tensor_of_frozen(const Frozen& frozen) {
  std::vector<int64_t> places;
  for (const auto& place : frozen) places.push_back(place.value_or(-1));
  return at::tensor(places, at::kLong);
}
Frozen frozen_in(const StateDict& state, size_t fragments, size_t parameters) {
  if (!state.contains("frozen")) return Frozen(fragments);  // an earlier version saved it
  const auto places = numbers(state, "frozen");
  const auto fits = [&](int64_t place) { return place >= -1 && place < static_cast<int64_t>(parameters); };
  if (places.size() != fragments || !std::all_of(places.begin(), places.end(), fits))
    throw Error("the state of DiLoCo has a list of frozen parameters that does not fit this model");
  Frozen frozen;
  for (const int64_t place : places)
    frozen.push_back(place < 0 ? std::nullopt : std::optional(static_cast<int32_t>(place)));
  return frozen;
}

void insert_turns(StateDict& state, const diloco::IslandTurns& turns) {
  if (!turns.stream()) return;
  insert_number(state, "island_turn", turns.at());
  std::vector<int64_t> words;
  for (const diloco::SentFragment& sent : turns.under_way)
    words.insert(words.end(), {sent.round, static_cast<int64_t>(sent.fragment), sent.sent_at});
  state.insert("island_under_way", at::tensor(words, at::kLong).view({-1, 3}));
}

std::deque<diloco::SentFragment> under_way_in(const StateDict& state, const diloco::IslandTurns& turns) {
  std::deque<diloco::SentFragment> under_way;
  if (!turns.stream()) return under_way;
  const auto words = numbers(state, "island_under_way");
  for (size_t i = 0; i + 3 <= words.size(); i += 3) {
    if (words[i] < 1 || words[i + 1] != static_cast<int64_t>(turns.fragment_of(words[i])))
      throw Error("the state of DiLoCo has a round of an unknown fragment");
    under_way.push_back(
        {.round = words[i], .fragment = turns.fragment_of(words[i]), .sent_at = words[i + 2], .has_come = true});
  }
  return under_way;
}

/// The states of the ranks of each machine that have slices, in the order of the slices.
std::vector<std::vector<const StateDict*>> by_machine(const std::vector<StateDict>& ranks) {
  std::vector<std::vector<const StateDict*>> machines;
  for (const StateDict& state : ranks) {
    const auto place = numbers(state, "place");
    if (place.size() != 4) throw Error("the state of DiLoCo has no `place` of four numbers");
    machines.resize(static_cast<size_t>(place[1]));
    auto& slices = machines.at(static_cast<size_t>(place[0]));
    slices.resize(static_cast<size_t>(place[3]));
    if (place[2] >= 0) slices.at(static_cast<size_t>(place[2])) = &state;
  }
  for (const auto& slices : machines)
    if (slices.empty() || std::find(slices.begin(), slices.end(), nullptr) != slices.end())
      throw Error("the states of DiLoCo lack slices of some machines");
  return machines;
}

/// One row of all slices. An entry that is no row of numbers is the same on all ranks.
at::Tensor joined(const std::vector<const StateDict*>& slices, const std::string& name) {
  if ((*slices.front())[name].dim() != 1) return (*slices.front())[name];
  std::vector<at::Tensor> parts;
  for (const StateDict* slice : slices) parts.push_back((*slice)[name]);
  return at::cat(parts);
}

}  // namespace

std::vector<int64_t> DiLoCo::State::place() const {
  return {machines_.own(), machines_.count(), machines_.owns_slice() ? machines_.here().rank() : -1,
          machines_.slices()};
}

StateDict DiLoCo::State::state_dict() {
  if (!problem_.empty()) throw Error(problem_);
  if (islands_) AmongIslands(*this).hear_all();
  // First, since sending a mean changes what is left of it.
  std::vector<Outcome> outcomes;
  for (Round& round : under_way_) {
    outcomes.push_back(outcome_of(round));
    if (!outcomes.back().error.empty()) throw Error(outcomes.back().error);
  }
  StateDict state;
  insert_number(state, "step", stats.steps);
  saved_at_ = stats.steps;
  if (islands_) {
    insert_number(state, "island", islands_->island());
    insert_number(state, "island_round", stats.rounds);
    insert_turns(state, islands_->turns);
  }
  state.insert("machines", at::tensor(machines_.layout(), at::kLong));
  state.insert("options", tensor_of_text(described()));
  state.insert("place", at::tensor(place(), at::kLong));
  const auto& trained = model_.attached.trained();
  std::vector<int64_t> sizes, fragment_of(trained.size());
  for (const auto& [name, tensor] : trained) sizes.push_back(tensor.numel());
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment) {
    for (const size_t place : fragment_parameters_[fragment]) fragment_of[place] = static_cast<int64_t>(fragment);
    for (const auto& item : fragments_[fragment].state_dict())
      state.insert(fragment_name(fragment) + item.key(), item.value());
  }
  state.insert("sizes", at::tensor(sizes, at::kLong));
  state.insert("fragment_of", at::tensor(fragment_of, at::kLong));
  state.insert("frozen", tensor_of_frozen(frozen_));
  insert_number(state, "rounds_under_way", static_cast<int64_t>(under_way_.size()));
  for (size_t n = 0; n < under_way_.size(); ++n) {
    const Round& round = under_way_[n];
    insert_number(state, round_name(n) + "fragment", static_cast<int64_t>(round.fragment));
    insert_number(state, round_name(n) + "sent_at", round.sent_at);
    const at::Tensor took_part = at::zeros({machines_.count()}, at::kLong);
    for (int machine = 0; machine < machines_.count(); ++machine)
      took_part[machine] = static_cast<int64_t>(outcomes[n].took_part[static_cast<size_t>(machine)]);
    state.insert(round_name(n) + "took_part", took_part);
    if (round.exchange && round.exchange->mean().defined())
      state.insert(round_name(n) + "mean", round.exchange->mean().clone());
  }
  return state;
}

bool DiLoCo::State::fits_ranks(const StateDict& state) const {
  return numbers(state, "machines") == machines_.layout();
}

void DiLoCo::State::check_state(const StateDict& state) const {
  if (numbers(state, "place") != place())
    throw Error(
        "the state of DiLoCo belongs to another rank, or to other machines; start as many ranks on as many machines as "
        "before, or load the states of all ranks with load_from_ranks()");
  const auto sizes = numbers(state, "sizes"), fragment_of = numbers(state, "fragment_of");
  const auto& trained = model_.attached.trained();
  if (sizes.size() != trained.size() || fragment_of.size() != trained.size())
    throw Error("the state of DiLoCo belongs to another model: it has " + std::to_string(sizes.size()) +
                " parameters, and this model trains " + std::to_string(trained.size()));
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment)
    for (const size_t at : fragment_parameters_[fragment]) {
      if (sizes[at] != trained[at].second.numel())
        throw Error("the state of DiLoCo belongs to another model: parameter " + trained[at].first + " has " +
                    std::to_string(sizes[at]) + " elements there, and " + std::to_string(trained[at].second.numel()) +
                    " in this model");
      if (fragment_of[at] != static_cast<int64_t>(fragment))
        throw Error(
            "the state of DiLoCo has other fragments; set DiLoCoOptions::fragments as in the run that saved it");
    }
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment)
    fragments_[fragment].check(without_prefix(fragment_name(fragment), state));
  check_options(state, described());
  if (islands_ && number(state, "island") != islands_->island())
    throw Error("the state of DiLoCo was saved by machine " + std::to_string(number(state, "island")) +
                " of `lockstep run --islands`, and this is machine " + std::to_string(islands_->island()) +
                "; give each machine a folder of its own for its checkpoints, by lockstep::island().number");
}

void DiLoCo::State::load_state_dict(const StateDict& state) {
  check_state(state);
  std::deque<Round> rounds;
  for (int64_t n = 0; n < number(state, "rounds_under_way"); ++n) {
    const std::string prefix = round_name(static_cast<size_t>(n));
    Round round{static_cast<size_t>(number(state, prefix + "fragment")), number(state, prefix + "sent_at"), {}};
    if (round.fragment >= fragments_.size()) throw Error("the state of DiLoCo has a round of an unknown fragment");
    Outcome outcome;
    for (const int64_t one : numbers(state, prefix + "took_part")) outcome.took_part.push_back(one != 0);
    const at::Tensor* mean = state.find(prefix + "mean");
    if (machines_.owns_slice()) {
      const bool has_mean =
          std::find(outcome.took_part.begin(), outcome.took_part.end(), true) != outcome.took_part.end();
      if (has_mean != (mean != nullptr) || (has_mean && mean->numel() != fragments_[round.fragment].slice()))
        throw Error("the state of DiLoCo has a round whose mean does not fit its fragment");
      round.exchange.emplace(outcome, mean != nullptr ? mean->clone() : at::Tensor());
    }
    rounds.push_back(std::move(round));
  }
  std::deque<diloco::SentFragment> under_way;
  if (islands_) under_way = under_way_in(state, islands_->turns);
  const int64_t steps = number(state, "step");
  auto frozen = frozen_in(state, fragments_.size(), names_.size());
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment)
    fragments_[fragment].load_state_dict(without_prefix(fragment_name(fragment), state));
  under_way_ = std::move(rounds);
  frozen_ = std::move(frozen);
  problem_.clear();
  empty_rounds_ = {};
  held_.left_out = outer_copies_left_out().times;
  stats.steps = steps;
  stats.rounds = islands_ ? number(state, "island_round") : stats.rounds;
  if (!islands_) return;
  if (islands_->turns.stream()) islands_->turns.set_at(number(state, "island_turn"));
  islands_->turns.under_way = std::move(under_way);
  islands_->pause();  // step() gets the outer state that the other machines have now
}

void DiLoCo::State::load_from_ranks(const std::vector<StateDict>& ranks) {
  if (ranks.empty()) throw Error("DiLoCo: the list of the ranks' states is empty");
  const at::NoGradGuard no_grad;
  const auto machines = by_machine(ranks);
  const auto& first = machines.front();
  StateDict state;
  /// This rank's part of a row of all old slices.
  const auto cut = [&](const at::Tensor& row, const OuterFragment& fragment) {
    if (row.dim() != 1) return row;
    const at::Tensor padded = at::zeros({machines_.slices() * fragment.slice()}, row.options());
    const int64_t kept = std::min(row.numel(), fragment.fragment().elements());
    padded.narrow(0, 0, kept).copy_(row.narrow(0, 0, kept));
    return padded.narrow(0, machines_.here().rank() * fragment.slice(), fragment.slice()).clone();
  };
  for (const auto& item : *first.front()) {
    const std::string& name = item.key();
    if (!name.starts_with("fragment.") && !name.starts_with("under_way.")) {
      // Parameters go on from the outer copy, whichever were frozen since.
      if (name != "place" && name != "machines" && name != "frozen") state.insert(name, item.value());
      continue;
    }
    const bool is_round = name.starts_with("under_way.");
    if (is_round && name.ends_with(".took_part")) {
      const std::string mean = name.substr(0, name.rfind('.')) + ".mean";
      state.insert(name, at::full({machines_.count()}, first.front()->contains(mean) ? 1 : 0, at::kLong));
      continue;
    }
    const auto which = static_cast<size_t>(
        is_round ? number(*first.front(), name.substr(0, name.rfind('.')) + ".fragment") : std::stoll(name.substr(9)));
    if (which >= fragments_.size())
      throw Error("the state of DiLoCo has other fragments; set DiLoCoOptions::fragments as in the run that saved it");
    if (!machines_.owns_slice() && item.value().dim() == 1) continue;
    at::Tensor row = joined(first, name);
    if (name.ends_with(".rest") || name.ends_with(".mean_rest")) {
      // All new machines share the rest that machines have yet to send; each part of a mean is on one machine.
      for (size_t machine = 1; machine < machines.size(); ++machine) row = row + joined(machines[machine], name);
      if (name.ends_with(".rest")) row = row / static_cast<double>(machines.size());
    }
    state.insert(name, cut(row, fragments_[which]));
  }
  state.insert("place", at::tensor(place(), at::kLong));
  state.insert("machines", at::tensor(machines_.layout(), at::kLong));
  load_state_dict(state);
  for (size_t fragment = 0; fragment < fragments_.size(); ++fragment) write(fragment, /*keep=*/0);
}

}  // namespace lockstep
