#include <algorithm>
#include <chrono>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <lockstep/error.h>

#include "base/hash.h"
#include "base/weights_set.h"
#include "collectives/storages.h"
#include "data_parallel/divergence.h"
#include "diloco/rounds.h"
#include "diloco/wire_format.h"

// Rounds among machines that come and go, under `lockstep run --islands`. The hub (hosts/round_hub.h) collects the
// encoded pseudo-gradients, and sends all of a round to every machine. A machine that a round was closed without moves
// its parameters as the outer copy moves, so that what it has learned is in its next pseudo-gradient.

namespace lockstep {
namespace {

using diloco::OuterFragment;
using Tensors = c10::Dict<std::string, at::Tensor>;

std::string bytes_of(const StateDict& state) {
  Tensors all;
  for (const auto& item : state) all.insert(item.key(), item.value());
  const std::vector<char> bytes = torch::jit::pickle_save(c10::IValue(all));
  return {bytes.begin(), bytes.end()};
}

StateDict state_of_bytes(const std::string& bytes) {
  const c10::IValue all = torch::jit::pickle_load(std::vector<char>(bytes.begin(), bytes.end()));
  StateDict state;
  for (const auto& item : all.toGenericDict()) state.insert(item.key().toStringRef(), item.value().toTensor());
  return state;
}

}  // namespace

class DiLoCo::State::AmongIslands {
 public:
  explicit AmongIslands(State& state) : s_(state) {}
  bool step();
  void finish();

 private:
  /// Gets the outer state of another machine, or gives its own to all.
  void join_islands();
  /// Returns whether it has missed the round that it wanted to contribute to, and keeps what it has learned.
  bool island_round();
  void apply(const diloco::IslandRound& round, bool was_sent);
  void give_state() const;
  void take_state(const std::string& bytes);
  uint64_t model_and_options() const;
  /// The parameters minus the outer copy. Every rank of the machine calls these.
  at::Tensor learned_since_round() const;
  /// The parameters become the outer copy plus `learned`.
  void move_with_outer(const at::Tensor& learned);

  State& s_;
};

bool DiLoCo::State::step_among_islands() { return AmongIslands(*this).step(); }
void DiLoCo::State::finish_among_islands() { AmongIslands(*this).finish(); }

uint64_t DiLoCo::State::AmongIslands::model_and_options() const {
  std::string text = s_.described() + std::to_string(s_.machines_.slices());
  for (const std::string& name : s_.names_) text += '\n' + name;
  for (const auto& [name, tensor] : s_.model_.attached.trained()) text += ' ' + std::to_string(tensor.numel());
  uint64_t hash = Hash::kStart;
  for (const char c : text) hash = Hash::mixed(hash, static_cast<unsigned char>(c));
  return hash;
}

void DiLoCo::State::AmongIslands::give_state() const {
  s_.islands_->give(s_.stats.rounds, bytes_of(s_.fragments_.front().state_dict()));
}

void DiLoCo::State::AmongIslands::take_state(const std::string& bytes) {
  const at::NoGradGuard no_grad;
  OuterFragment& fragment = s_.fragments_.front();
  const StateDict state = state_of_bytes(s_.islands_->slice_of(bytes));
  fragment.check(state);
  fragment.load_state_dict(state);
  // What rounding lost was the other machine's.
  if (fragment.rest().defined()) fragment.rest().zero_();
}

at::Tensor DiLoCo::State::AmongIslands::learned_since_round() const {
  const OuterFragment& fragment = s_.fragments_.front();
  const int64_t elements = fragment.fragment().elements();
  const at::NoGradGuard no_grad;
  const at::Tensor outer = fragment.whole(s_.machines_).narrow(0, 0, elements);
  at::Tensor learned = fragment.fragment().read(0, elements) - outer;
  s_.machines_.here().barrier();  // another rank may write parameters that they share
  return learned;
}

void DiLoCo::State::AmongIslands::move_with_outer(const at::Tensor& learned) {
  const OuterFragment& fragment = s_.fragments_.front();
  const at::NoGradGuard no_grad;
  const at::Tensor moved = fragment.whole(s_.machines_).narrow(0, 0, learned.numel()) + learned;
  fragment.fragment().write(moved, /*keep=*/0, /*writes_shared=*/s_.machines_.here().rank() == 0);
  s_.machines_.here().barrier();
  note_weights_set(storages_of(fragment.fragment().parameters()));
}

void DiLoCo::State::AmongIslands::join_islands() {
  const auto start = std::chrono::steady_clock::now();
  const auto joined = s_.islands_->join(s_.stats.steps, model_and_options());
  OuterFragment& fragment = s_.fragments_.front();
  if (joined.state) {
    s_.stats.rounds = joined.round;
    const at::Tensor learned = learned_since_round();
    take_state(*joined.state);
    if (joined.starts) {
      move_with_outer(learned);
      fragment.set_sent_at(-1);
    } else {
      s_.write(fragment, /*keep=*/0);
      fragment.set_sent_at(s_.stats.steps);
    }
  } else {
    give_state();
  }
  s_.stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // One that comes later contributes early, so that the others need not wait for it; then it is in step with them.
  s_.turn_at_ =
      s_.stats.steps + (joined.starts ? s_.options_.sync_every : std::max<int64_t>(1, s_.options_.sync_every / 2));
}

void DiLoCo::State::AmongIslands::apply(const diloco::IslandRound& round, bool was_sent) {
  const at::NoGradGuard no_grad;
  OuterFragment& fragment = s_.fragments_.front();
  s_.stats.rounds = round.number;
  s_.stats.took_part.assign(static_cast<size_t>(s_.islands_->count()), false);
  const int64_t slice = fragment.slice(), message = diloco::encoded_bytes(s_.options_.wire, slice);
  std::vector<double> sums(static_cast<size_t>(slice));
  std::vector<float> decoded(sums.size());
  for (const auto& [island, slices] : round.sent) {
    if (static_cast<int64_t>(slices.size()) != message * s_.machines_.slices())
      throw Error("DiLoCo: machine " + std::to_string(island) + " has sent " + std::to_string(slices.size()) +
                  " bytes in round " + std::to_string(round.number) + ", and " +
                  std::to_string(message * s_.machines_.slices()) + " were expected");
    s_.stats.took_part.at(static_cast<size_t>(island)) = true;
    ++s_.stats.rounds_by_machine.at(static_cast<size_t>(island));
    const auto* const from = reinterpret_cast<const uint8_t*>(slices.data()) + s_.machines_.here().rank() * message;
    diloco::decode(s_.options_.wire, from, slice, decoded.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += decoded[i];
  }
  if (round.sent.empty()) return;
  const at::Tensor mean = at::empty({slice});
  for (size_t i = 0; i < sums.size(); ++i)
    mean.data_ptr<float>()[i] = static_cast<float>(sums[i] / static_cast<double>(round.sent.size()));
  if (was_sent) {
    fragment.step(mean);
    return s_.write(fragment, /*keep=*/0);
  }
  const at::Tensor learned = learned_since_round();
  fragment.step(mean);
  move_with_outer(learned);
}

bool DiLoCo::State::AmongIslands::island_round() {
  OuterFragment& fragment = s_.fragments_.front();
  const at::Tensor rest_before = fragment.rest().defined() ? fragment.rest().clone() : at::Tensor();
  State::Round own = s_.begin(0);  // of this machine alone: its ranks compare themselves
  const diloco::Outcome outcome = s_.outcome_of(own);
  if (!outcome.error.empty()) throw Error(outcome.error);
  const bool is_finite = outcome.took_part.front();
  std::string message;
  if (is_finite) {
    message.resize(static_cast<size_t>(diloco::encoded_bytes(s_.options_.wire, fragment.slice())));
    auto* const to = reinterpret_cast<uint8_t*>(message.data());
    const float* const values = own.exchange->mean().const_data_ptr<float>();
    if (rest_before.defined())
      diloco::encode_with_rest(s_.options_.wire, values, fragment.slice(), to, fragment.rest().data_ptr<float>());
    else
      diloco::encode(s_.options_.wire, values, fragment.slice(), to);
  } else if (s_.machines_.here().rank() == 0) {
    TORCH_WARN("DiLoCo: machine ", s_.islands_->island(), " was left out of the round of step ", s_.stats.steps,
               ": its parameters were not finite; it went on from the outer copy");
  }
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  const auto rounds = s_.islands_->contribute(s_.stats.rounds + 1, is_finite, hash_of(fragment.copy()), message, text);
  s_.stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  bool took_part = false, gives = false;
  for (const diloco::IslandRound& round : rounds) {
    const bool was_sent = round.sent.contains(s_.islands_->island());
    took_part = took_part || was_sent;
    apply(round, was_sent);
    // Later results may have come with it: a state is of the round after which it is given.
    gives = round.giver == s_.islands_->island();
    if (gives) give_state();
  }
  if (took_part) s_.stats.bytes_sent += static_cast<int64_t>(message.size());
  if (!took_part && rest_before.defined()) {
    const at::NoGradGuard no_grad;
    fragment.rest().copy_(rest_before);
  }
  const bool missed = !took_part && is_finite;
  if (missed) fragment.set_sent_at(-1);
  s_.turn_at_ = s_.stats.steps + (missed ? std::max<int64_t>(1, s_.options_.sync_every / 2) : s_.options_.sync_every);
  return missed;
}

bool DiLoCo::State::AmongIslands::step() {
  ++s_.stats.steps;
  if (!s_.islands_->is_in()) {
    join_islands();
    return true;
  }
  if (s_.stats.steps < s_.turn_at_) return false;
  island_round();
  return true;
}

void DiLoCo::State::AmongIslands::finish() {
  if (!s_.islands_->is_in()) join_islands();
  // One that is late tries again: the others' next round has room for it.
  constexpr int kMost = 8;
  for (int i = 0; i < kMost && s_.fragments_.front().sent_at() != s_.stats.steps; ++i) {
    if (!island_round()) break;
    if (!s_.islands_->is_in()) join_islands();
  }
  s_.islands_->leave();
}

}  // namespace lockstep
