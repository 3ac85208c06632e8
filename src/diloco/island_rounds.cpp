#include <algorithm>
#include <chrono>
#include <sstream>
#include <type_traits>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "base/hash.h"
#include "base/weights_set.h"
#include "collectives/cause.h"
#include "collectives/coalesced.h"
#include "collectives/storages.h"
#include "data_parallel/divergence.h"
#include "diloco/buffer_average.h"
#include "diloco/rounds.h"
#include "diloco/state_bytes.h"
#include "diloco/wire_format.h"

// Rounds among machines that come and go, under `lockstep run --islands`. The hub (hosts/round_hub.h) collects the
// encoded pseudo-gradients, and sends all of a round to every machine. A machine that a round was closed without moves
// its parameters as the outer copy moves, so that what it has learned is in its next pseudo-gradient. The hub remembers
// the step of each machine's last pseudo-gradient: one that comes back at an earlier step repeats the steps between,
// and sends nothing of them, so that no sample counts twice.

namespace lockstep {
namespace {

using diloco::OuterFragment;

/// Of a whole outer state in floats: the copy, two of an optimizer like Adam, what rounding lost, and its mean.
constexpr int64_t kMostInAState = 5 * sizeof(float);

std::string name_of_other(size_t i) { return "other." + std::to_string(i); }

std::vector<int64_t> numbers_of(const StateDict& state, const std::string& name) {
  const at::Tensor* const found = state.find(name);
  if (found == nullptr || found->scalar_type() != at::kLong || found->dim() != 1)
    throw Error("DiLoCo: the outer state of another machine has no `" + name +
                "`; give all machines the same Lockstep");
  return {found->const_data_ptr<int64_t>(), found->const_data_ptr<int64_t>() + found->numel()};
}

/// Throws Error unless a state has a tensor like `own`, which is the `i`th that is not trained.
void check_other(const StateDict& state, size_t i, const at::Tensor& own) {
  const at::Tensor* const found = state.find(name_of_other(i));
  if (found != nullptr && found->sizes() == own.sizes() && found->scalar_type() == own.scalar_type()) return;
  throw Error(
      "DiLoCo: the outer state of another machine has other frozen parameters or buffers than this one's model; "
      "give all machines the same model");
}

}  // namespace

class DiLoCo::State::AmongIslands {
 public:
  explicit AmongIslands(State& state) : s_(state) {}
  bool step() {
    return reported([this] { return make_step(); });
  }
  void finish(bool leaves) {
    reported([this, leaves] { meet(leaves); });
  }

 private:
  bool make_step();
  /// Has a round now of what was trained since the last one.
  void meet(bool leaves);
  /// Returns what `call` does; its error reaches the other machines as well.
  template <typename Call>
  std::invoke_result_t<Call> reported(const Call& call) const {
    try {
      return call();
    } catch (const std::exception& error) {
      s_.islands_->report(error.what());
      throw;
    }
  }
  /// Gets the outer state of another machine, or gives its own to all.
  void join_islands();
  void check_has_not_left(const char* call) const;
  void take_place(const diloco::Islands::Joined& joined);
  /// Returns whether it has missed the round that it wanted to contribute to, and keeps what it has learned.
  bool island_round();
  std::string encoded(State::Round& own, const at::Tensor& rest_before) const;
  /// The rounds that were closed while this machine repeats steps.
  void follow();
  void apply_all(const std::vector<diloco::IslandRound>& rounds, bool& took_part);
  void apply(const diloco::IslandRound& round, bool was_sent);
  void give_state() const;
  void take_state(const std::string& bytes);
  std::string model_and_options() const;
  /// The parameters minus the outer copy. Every rank of the machine calls these.
  at::Tensor learned_since_round() const;
  /// The parameters become the outer copy plus `learned`.
  void move_with_outer(const at::Tensor& learned);
  void warn(const std::string& text) const {
    if (s_.machines_.here().rank() == 0) TORCH_WARN("DiLoCo: machine ", s_.islands_->island(), text);
  }
  int64_t half_a_round() const { return std::max<int64_t>(1, s_.options_.sync_every / 2); }
  diloco::Islands::Turn& turn() const { return s_.islands_->turn; }
  const NamedTensors& buffers() const { return s_.model_.attached.buffers(); }
  OuterFragment& fragment() const { return s_.fragments_.front(); }

  State& s_;
};

void DiLoCo::State::check_for_islands() const {
  const std::string name = "DiLoCo: `lockstep run --islands`";
  TORCH_CHECK(machines_.count() == 1, name, " makes each machine a run of its own, and this group has ",
              machines_.count(), " machines; start the program with one or the other");
  TORCH_CHECK(options_.fragments == 1, name, " supports fragments = 1 only, and it is ", options_.fragments,
              "; leave fragments out, or --islands");
  TORCH_CHECK(options_.overlap_steps == 0, name, " supports overlap_steps = 0 only, and it is ", options_.overlap_steps,
              "; leave overlap_steps out, or --islands");
  const OuterFragment& fragment = fragments_.front();
  const int64_t round = (diloco::encoded_bytes(options_.wire, fragment.slice()) * machines_.slices() +
                         diloco::bytes_of_buffers(model_.attached.buffers())) *
                        islands_->count();
  int64_t state = fragment.slice() * machines_.slices() * kMostInAState;
  for (const at::Tensor& other : others()) state += static_cast<int64_t>(other.nbytes());
  TORCH_CHECK(std::max(round, state) < static_cast<int64_t>(hub::kMostBytes), name,
              " sends messages of at most 3.75 GiB; the outer state of this model may take ", state,
              " bytes, and a round of all machines ", round, "; train a smaller model, or leave --islands out");
}

bool DiLoCo::State::step_among_islands() { return AmongIslands(*this).step(); }
void DiLoCo::State::finish_among_islands(bool leaves) { AmongIslands(*this).finish(leaves); }

std::string DiLoCo::State::AmongIslands::model_and_options() const {
  std::ostringstream text;
  text << s_.agreed_ << "ranks " << s_.machines_.slices() << '\n';
  for (const auto& [name, tensor] : s_.model_.attached.trained())
    text << "parameter " << name << ' ' << tensor.scalar_type() << ' ' << tensor.sizes() << '\n';
  for (const auto& [name, buffer] : buffers())
    text << "buffer " << name << ' ' << buffer.scalar_type() << ' ' << buffer.sizes() << '\n';
  return text.str();
}

void DiLoCo::State::AmongIslands::give_state() const {
  StateDict state = fragment().state_dict();
  const auto others = s_.others();
  state.insert("empty_rounds", at::tensor(s_.empty_rounds_.rounds, at::kLong));
  if (s_.machines_.here().rank() == 0)
    for (size_t i = 0; i < others.size(); ++i) state.insert(name_of_other(i), others[i].detach().cpu());
  s_.islands_->give(s_.stats.rounds, diloco::bytes_of_state(state));
}

void DiLoCo::State::AmongIslands::take_state(const std::string& bytes) {
  const at::NoGradGuard no_grad;
  const auto others = s_.others();
  const std::string problem = failure_of([&] {
    const StateDict state = diloco::state_of_bytes(s_.islands_->slice_of(bytes));
    fragment().check(state);
    if (s_.machines_.here().rank() == 0)
      for (size_t i = 0; i < others.size(); ++i) check_other(state, i, others[i]);
    fragment().load_state_dict(state);
    s_.empty_rounds_.rounds = numbers_of(state, "empty_rounds");
    if (s_.machines_.here().rank() == 0)
      for (size_t i = 0; i < others.size(); ++i) others[i].detach().copy_(state[name_of_other(i)]);
  });
  // Each rank has read a slice of its own.
  for (const std::string& one : s_.machines_.here().all_gather_bytes(problem))
    if (!one.empty()) throw Error(one);
  // What rounding lost was the other machine's.
  if (fragment().rest().defined()) fragment().rest().zero_();
  if (!others.empty() && s_.machines_.here().world_size() > 1) broadcast_weights(s_.machines_.here(), others, 0);
}

at::Tensor DiLoCo::State::AmongIslands::learned_since_round() const {
  const int64_t elements = fragment().fragment().elements();
  const at::NoGradGuard no_grad;
  const at::Tensor outer = fragment().whole(s_.machines_).narrow(0, 0, elements);
  at::Tensor learned = fragment().fragment().read(0, elements) - outer;
  s_.machines_.here().barrier();  // another rank may write parameters that they share
  return learned;
}

void DiLoCo::State::AmongIslands::move_with_outer(const at::Tensor& learned) {
  const at::NoGradGuard no_grad;
  const at::Tensor moved = fragment().whole(s_.machines_).narrow(0, 0, learned.numel()) + learned;
  fragment().fragment().write(moved, /*keep=*/0, /*writes_shared=*/s_.machines_.here().rank() == 0);
  s_.machines_.here().barrier();
  note_weights_set(storages_of(fragment().fragment().parameters()));
}

void DiLoCo::State::AmongIslands::join_islands() {
  const auto start = std::chrono::steady_clock::now();
  if (s_.stats.rounds == 0 && s_.islands_->count() > 1 && !diloco::has_asked_for_island_shard())
    warn(
        ": island_shard() was not called, so all machines of --islands may read the same data; give its Shard to the "
        "DataLoader");
  const auto joined = s_.islands_->join(s_.stats.rounds, model_and_options());
  if (joined.state)
    take_place(joined);
  else
    give_state();
  s_.stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  // One that comes later contributes early, so that the others need not wait for it; then it is in step with them.
  const int64_t every = s_.options_.sync_every;
  turn().at = joined.starts ? (s_.stats.steps / every + 1) * every : s_.stats.steps + half_a_round();
  turn().repeats_until = joined.counted_step;
  if (s_.stats.steps < turn().repeats_until) turn().at = std::min(turn().repeats_until, turn().at);
}

void DiLoCo::State::AmongIslands::take_place(const diloco::Islands::Joined& joined) {
  const bool is_counted = s_.stats.steps <= joined.counted_step || s_.stats.rounds < joined.counted_round;
  if (joined.starts && joined.round > s_.stats.rounds)
    warn((s_.stats.rounds > 0 ? " goes on from a checkpoint after round " + std::to_string(s_.stats.rounds)
                              : " has no checkpoint and begins at step " + std::to_string(s_.stats.steps)) +
         ", and another one goes on from round " + std::to_string(joined.round) +
         ": what it had contributed between is trained again");
  if (s_.stats.steps < joined.counted_step)
    warn(" comes back at step " + std::to_string(s_.stats.steps) + ", and its work up to step " +
         std::to_string(joined.counted_step) +
         " is in the outer copy: it repeats these steps, and sends nothing of "
         "them; save a checkpoint whenever step() returns true to have fewer of them");
  const at::Tensor learned = learned_since_round();
  take_state(*joined.state);
  s_.stats.rounds = joined.round;
  if (is_counted) {
    s_.write(/*fragment=*/0, /*keep=*/0);
    fragment().set_sent_at(s_.stats.steps);
  } else {
    move_with_outer(learned);
    fragment().set_sent_at(-1);
  }
}

void DiLoCo::State::AmongIslands::apply_all(const std::vector<diloco::IslandRound>& rounds, bool& took_part) {
  for (const diloco::IslandRound& round : rounds) {
    const bool was_sent = round.sent.contains(s_.islands_->island());
    took_part = took_part || was_sent;
    apply(round, was_sent);
    // Later results may have come with it: a state is of the round after which it is given.
    if (round.giver == s_.islands_->island()) give_state();
  }
}

void DiLoCo::State::AmongIslands::apply(const diloco::IslandRound& round, bool was_sent) {
  const at::NoGradGuard no_grad;
  s_.stats.rounds = round.number;
  s_.stats.took_part.assign(static_cast<size_t>(s_.islands_->count()), false);
  const int64_t slice = fragment().slice(), message = diloco::encoded_bytes(s_.options_.wire, slice);
  const int64_t all_slices = message * s_.machines_.slices();
  const int64_t expected = all_slices + diloco::bytes_of_buffers(buffers());
  std::vector<double> sums(static_cast<size_t>(slice));
  diloco::BufferAverage average(buffers());
  std::vector<float> decoded(sums.size());
  for (const auto& [island, slices] : round.sent) {
    if (static_cast<int64_t>(slices.size()) != expected)
      throw Error("DiLoCo: machine " + std::to_string(island) + " has sent " + std::to_string(slices.size()) +
                  " bytes in round " + std::to_string(round.number) + ", and " + std::to_string(expected) +
                  " were expected; give all machines the same Lockstep");
    s_.stats.took_part.at(static_cast<size_t>(island)) = true;
    ++s_.stats.rounds_by_machine.at(static_cast<size_t>(island));
    const auto* const from = reinterpret_cast<const uint8_t*>(slices.data()) + s_.machines_.here().rank() * message;
    diloco::decode(s_.options_.wire, from, slice, decoded.data());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += decoded[i];
    if (!average.add(slices.substr(static_cast<size_t>(all_slices))))
      warn(" hears in round " + std::to_string(round.number) + " that machine " + std::to_string(island) +
           " has buffers that are not finite: they are left out of the average");
  }
  s_.problem_ = s_.empty_rounds_.note(round.number, round.sent.empty(), s_.options_.max_nonfinite_rounds);
  if (!s_.problem_.empty()) throw Error(s_.problem_);
  if (round.sent.empty()) return;
  const at::Tensor mean = at::empty({slice});
  for (size_t i = 0; i < sums.size(); ++i)
    mean.data_ptr<float>()[i] = static_cast<float>(sums[i] / static_cast<double>(round.sent.size()));
  if (was_sent) {
    average.set();
    fragment().step(mean);
    s_.write(/*fragment=*/0, /*keep=*/0);
    return;
  }
  const at::Tensor learned = learned_since_round();
  fragment().step(mean);
  move_with_outer(learned);
}

std::string DiLoCo::State::AmongIslands::encoded(State::Round& own, const at::Tensor& rest_before) const {
  const int64_t slice = fragment().slice();
  std::string message(static_cast<size_t>(diloco::encoded_bytes(s_.options_.wire, slice)), '\0');
  auto* const to = reinterpret_cast<uint8_t*>(message.data());
  const float* const values = own.exchange->mean().const_data_ptr<float>();
  if (rest_before.defined())
    diloco::encode_with_rest(s_.options_.wire, values, slice, to, fragment().rest().data_ptr<float>());
  else
    diloco::encode(s_.options_.wire, values, slice, to);
  return message;
}

bool DiLoCo::State::AmongIslands::island_round() {
  const at::Tensor rest_before = fragment().rest().defined() ? fragment().rest().clone() : at::Tensor();
  State::Round own = s_.begin(0);  // of this machine alone: its ranks compare themselves
  const diloco::Outcome outcome = s_.outcome_of(own);
  if (!outcome.error.empty()) throw Error(outcome.error);
  const bool is_finite = outcome.took_part.front();
  if (!is_finite)
    warn(" was left out of the round of step " + std::to_string(s_.stats.steps) +
         ": its parameters were not finite; it continues from the outer copy");
  const std::string message = is_finite ? encoded(own, rest_before) : "";
  const std::string more = is_finite && s_.machines_.here().rank() == 0 ? diloco::buffer_bytes(buffers()) : "";
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  const auto rounds = s_.islands_->contribute({.round = s_.stats.rounds + 1,
                                               .step = s_.stats.steps,
                                               .takes_part = is_finite,
                                               .outer = hash_of(fragment().copy())},
                                              message, more, text);
  s_.stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  bool took_part = false;
  apply_all(rounds, took_part);
  if (took_part) s_.stats.bytes_sent += static_cast<int64_t>(message.size() + more.size());
  if (!took_part && rest_before.defined()) {
    const at::NoGradGuard no_grad;
    fragment().rest().copy_(rest_before);
  }
  const bool missed = !took_part && is_finite;
  if (missed) fragment().set_sent_at(-1);
  turn().at = s_.stats.steps + (missed ? half_a_round() : s_.options_.sync_every);
  // At once, while it knows what it has sent, which the hub may have counted.
  if (!s_.islands_->is_in() && !s_.islands_->is_asked_to_stop()) join_islands();
  return fragment().sent_at() != s_.stats.steps;
}

void DiLoCo::State::AmongIslands::follow() {
  std::string text;
  bool took_part = false;
  apply_all(s_.islands_->results(text), took_part);
  // It has been behind for long enough.
  turn().at = s_.stats.steps + std::max<int64_t>(1, s_.options_.sync_every / 4);
  if (!s_.islands_->is_in()) return join_islands();
  if (s_.stats.steps < turn().repeats_until) {
    turn().at = std::min(turn().at, turn().repeats_until);
    return;
  }
  s_.write(/*fragment=*/0, /*keep=*/0);
  fragment().set_sent_at(s_.stats.steps);
}

void DiLoCo::State::AmongIslands::check_has_not_left(const char* call) const {
  if (s_.islands_->has_left())
    throw Error(std::string("DiLoCo: ") + call +
                "() after finish(), by which this machine has left the rounds of `lockstep run --islands`; call "
                "finish() once, at the end, and synchronise() before");
}

bool DiLoCo::State::AmongIslands::make_step() {
  check_has_not_left("step");
  ++s_.stats.steps;
  s_.islands_->note_step();
  if (s_.islands_->is_asked_to_stop()) return false;  // the program is about to save what it has
  if (!s_.islands_->is_in()) {
    join_islands();
    return true;
  }
  if (s_.stats.steps < turn().at) return false;
  s_.stats.steps <= turn().repeats_until ? follow() : static_cast<void>(island_round());
  return true;
}

void DiLoCo::State::AmongIslands::meet(bool leaves) {
  if (leaves && s_.islands_->has_left()) return;
  check_has_not_left("synchronise");
  if (!s_.islands_->is_in()) join_islands();
  // One that is late tries again: the others' next round has room for it.
  constexpr int kMost = 8;
  bool missed = s_.stats.steps > turn().repeats_until && fragment().sent_at() != s_.stats.steps;
  for (int i = 0; i < kMost && missed && s_.islands_->is_in(); ++i) missed = island_round();
  if (missed)
    warn(" is late for the last " + std::to_string(kMost) + " rounds: what it has learned since is " +
         (leaves ? "lost" : "in the next one"));
  if (leaves) s_.islands_->leave();
}

}  // namespace lockstep
