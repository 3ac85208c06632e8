#include "diloco/island_rounds.h"

#include <algorithm>
#include <chrono>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "data_parallel/divergence.h"
#include "diloco/buffer_average.h"
#include "diloco/island_entry.h"
#include "diloco/wire_format.h"

namespace lockstep {
namespace {

using diloco::IslandRound;
using diloco::OuterFragment;
using diloco::SentFragment;

double seconds_after(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// What a machine sends of a fragment. `rest`: of error feedback, or undefined.
std::string encoded(Wire wire, const at::Tensor& pseudo_gradient, const at::Tensor& rest) {
  const int64_t slice = pseudo_gradient.numel();
  std::string message(static_cast<size_t>(diloco::encoded_bytes(wire, slice)), '\0');
  auto* const to = reinterpret_cast<uint8_t*>(message.data());
  const float* const values = pseudo_gradient.const_data_ptr<float>();
  if (rest.defined())
    diloco::encode_with_rest(wire, values, slice, to, rest.data_ptr<float>());
  else
    diloco::encode(wire, values, slice, to);
  return message;
}

}  // namespace

void DiLoCo::State::AmongIslands::join_islands() {
  take_back_all();
  IslandEntry(s_).join();
}

void DiLoCo::State::AmongIslands::join_if_out() {
  if (!s_.islands_->is_in() && !s_.islands_->is_asked_to_stop()) join_islands();
}

void DiLoCo::State::AmongIslands::take_back(const SentFragment& sent) {
  const at::NoGradGuard no_grad;
  OuterFragment& fragment = s_.fragments_[sent.fragment];
  if (sent.rest_before.defined()) at::Tensor(fragment.rest()).copy_(sent.rest_before);
  if (sent.is_finite) fragment.set_sent_at(-1);
}

void DiLoCo::State::AmongIslands::take_back_all() {
  for (const SentFragment& sent : turns().under_way)
    if (!sent.has_come) take_back(sent);
  if (std::erase_if(turns().under_way, [](const SentFragment& one) { return !one.has_come; }) > 0)
    turns().come_soon(s_.stats.steps);
}

void DiLoCo::State::AmongIslands::apply_all(const std::vector<IslandRound>& rounds) {
  for (const IslandRound& round : rounds) {
    apply(round);
    // Later results may have come with it: a state is of the round after which it is given.
    if (round.giver == s_.islands_->island()) IslandEntry(s_).give_state();
  }
}

at::Tensor DiLoCo::State::AmongIslands::mean_of(const IslandRound& round, size_t which,
                                                diloco::BufferAverage& average) {
  const bool has_buffers = which == 0;
  const int64_t slice = s_.fragments_[which].slice(), message = diloco::encoded_bytes(s_.options_.wire, slice);
  const int64_t all_slices = message * s_.machines_.slices();
  const int64_t expected = all_slices + (has_buffers ? diloco::bytes_of_buffers(s_.model_.attached.buffers()) : 0);
  std::vector<double> sums(static_cast<size_t>(slice));
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
    if (has_buffers && !average.add(slices.substr(static_cast<size_t>(all_slices))))
      s_.islands_->warn(" hears in round " + std::to_string(round.number) + " that machine " + std::to_string(island) +
                        " has buffers that are not finite: they are left out of the average");
  }
  const at::Tensor mean = at::empty({slice});
  for (size_t i = 0; i < sums.size(); ++i)
    mean.data_ptr<float>()[i] = static_cast<float>(sums[i] / static_cast<double>(round.sent.size()));
  return mean;
}

void DiLoCo::State::AmongIslands::apply(const IslandRound& round) {
  const size_t which = turns().fragment_of(round.number);
  OuterFragment& fragment = s_.fragments_[which];
  const bool was_sent = round.sent.contains(s_.islands_->island());
  s_.stats.rounds = round.number;
  s_.stats.took_part.assign(static_cast<size_t>(s_.islands_->count()), false);
  diloco::BufferAverage average(s_.model_.attached.buffers());
  const at::Tensor mean = mean_of(round, which, average);
  s_.problem_ = s_.empty_rounds_.note(which, round.number, round.sent.empty(), s_.options_.max_nonfinite_rounds);
  if (!s_.problem_.empty()) throw Error(s_.problem_);
  SentFragment* own = turns().of_round(round.number);
  // One that is not finite has gone on from the outer copy, and is due like the others'.
  const bool is_due_later = own != nullptr && !own->is_finite && s_.options_.overlap_steps > 0 && !round.sent.empty();
  if (own != nullptr && !was_sent && !is_due_later) {
    take_back(*own);
    turns().drop(round.number);
    own = nullptr;
  }
  if (round.sent.empty()) return;
  if (own != nullptr) {
    if (was_sent) s_.stats.bytes_sent += own->bytes;
    if (was_sent) own->buffers = std::move(average);
    fragment.step(mean);
    own->has_come = true;
    if (own->waits) settle(round.number);
    return;
  }
  if (was_sent) average.set();
  if (turns().of_fragment(which) != nullptr) return fragment.step(mean);  // its parameters are set when it is due
  const at::Tensor learned = fragment.learned(s_.machines_);
  fragment.step(mean);
  fragment.move(s_.machines_, learned);
}

void DiLoCo::State::AmongIslands::hear(int64_t round) {
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  const auto rounds = s_.islands_->results_until(round, text);
  s_.stats.wait_seconds += seconds_after(start);
  apply_all(rounds);
  if (!s_.islands_->is_in()) take_back_all();
}

void DiLoCo::State::AmongIslands::settle(int64_t round) {
  if (const SentFragment* const sent = turns().of_round(round); sent != nullptr && !sent->has_come) hear(round);
  const SentFragment* const found = turns().of_round(round);
  if (found == nullptr) return;  // it was closed without this machine
  const SentFragment sent = *found;
  turns().drop(round);
  // Nothing was trained since it was sent in this step.
  const bool is_new = sent.sent_at == s_.stats.steps;
  if (is_new && sent.buffers) sent.buffers->set();
  s_.write(sent.fragment, is_new ? 0 : s_.options_.mixing);
}

int64_t DiLoCo::State::AmongIslands::next_round() {
  for (;;) {
    const int64_t round = turns().next_round(s_.stats.rounds);
    // One that was late more than once comes to the same fragment early.
    const SentFragment* const before = turns().of_fragment(turns().fragment_of(round));
    if (before == nullptr) return round;
    settle(before->round);
  }
}

void DiLoCo::State::AmongIslands::send(bool waits) {
  const int64_t now = s_.stats.steps, round = next_round();
  const size_t which = turns().fragment_of(round);
  OuterFragment& fragment = s_.fragments_[which];
  SentFragment sent{.round = round, .fragment = which, .sent_at = now, .waits = waits};
  if (fragment.rest().defined()) sent.rest_before = fragment.rest().clone();
  State::Round own = s_.begin(which);  // of this machine alone: its ranks compare themselves
  const diloco::Outcome outcome = s_.outcome_of(own);
  if (!outcome.error.empty()) throw Error(outcome.error);
  sent.is_finite = outcome.took_part.front();
  if (!sent.is_finite)
    s_.islands_->warn(" was left out of the round of step " + std::to_string(now) +
                      ": its parameters were not finite; it continues from the outer copy");
  const std::string message = sent.is_finite ? encoded(s_.options_.wire, own.exchange->mean(), fragment.rest()) : "";
  const bool has_buffers = sent.is_finite && which == 0 && s_.machines_.here().rank() == 0;
  const std::string more = has_buffers ? diloco::buffer_bytes(s_.model_.attached.buffers()) : "";
  sent.bytes = static_cast<int64_t>(message.size() + more.size());
  turns().under_way.push_back(sent);
  const auto start = std::chrono::steady_clock::now();
  std::string text;
  const auto came = s_.islands_->contribute(
      {.round = round, .step = now, .takes_part = sent.is_finite, .outer = hash_of(fragment.copy())}, message, more,
      waits, text);
  s_.stats.wait_seconds += seconds_after(start);
  if (!came.is_sent) {
    take_back(sent);
    turns().drop(round);
  }
  apply_all(came.rounds);
  fragment.sent_at() == now ? turns().go_on(now, round) : turns().come_soon(now);
  if (!s_.islands_->is_in()) take_back_all();
}

void DiLoCo::State::AmongIslands::follow() {
  std::string text;
  apply_all(s_.islands_->results(text));
  const int64_t now = s_.stats.steps;
  turns().follow(now);
  if (!s_.islands_->is_in()) return;
  for (size_t which = 0; which < s_.fragments_.size(); ++which) {
    if (turns().repeats_until()[which] != now) continue;
    s_.write(which, /*keep=*/0);
    s_.fragments_[which].set_sent_at(now);
  }
}

void DiLoCo::State::AmongIslands::check_has_not_left(const char* call) const {
  if (s_.islands_->has_left())
    throw Error(std::string("DiLoCo: ") + call +
                "() after finish(), by which this machine has left the rounds of `lockstep run --islands`; call "
                "finish() once, at the end, and synchronise() before");
}

bool DiLoCo::State::AmongIslands::make_step() {
  check_has_not_left("step");
  const int64_t now = ++s_.stats.steps;
  const diloco::Islands& islands = *s_.islands_;
  islands.note_step();
  if (islands.is_asked_to_stop()) return false;  // the program is about to save what it has
  bool has_set = !islands.is_in();
  if (has_set) join_islands();
  while (islands.is_in() && turns().is_due(now)) {
    settle(turns().under_way.front().round);
    join_if_out();
    has_set = true;
  }
  while (islands.is_in() && now >= turns().at()) {
    const bool waits = s_.options_.overlap_steps == 0, follows = turns().is_repeating(now);
    follows ? follow() : send(waits);
    join_if_out();
    has_set = has_set || waits || follows;
  }
  return has_set;
}

bool DiLoCo::State::AmongIslands::is_met() const {
  if (turns().is_repeating(s_.stats.steps)) return true;
  return std::all_of(s_.fragments_.begin(), s_.fragments_.end(),
                     [&](const OuterFragment& one) { return one.sent_at() == s_.stats.steps; });
}

void DiLoCo::State::AmongIslands::meet(bool leaves) {
  if (leaves && s_.islands_->has_left()) return;
  check_has_not_left("synchronise");
  if (!s_.islands_->is_in()) join_islands();
  while (s_.islands_->is_in() && !turns().under_way.empty()) {
    settle(turns().under_way.front().round);
    join_if_out();
  }
  // One that is late tries again: the others' next round of the fragment has room for it.
  constexpr int kMost = 8;
  for (int64_t i = 0; i < kMost * turns().fragments() && !is_met() && s_.islands_->is_in(); ++i) {
    send(/*waits=*/true);
    join_if_out();
  }
  if (!is_met())
    s_.islands_->warn(" is late for the last " + std::to_string(kMost) + " rounds: what it has learned since is " +
                      (leaves ? "lost" : "in the next one"));
  if (leaves) s_.islands_->leave();
}

void DiLoCo::State::AmongIslands::hear_last() {
  if (!s_.islands_->is_in()) return;
  for (const SentFragment& sent : turns().under_way)
    if (!sent.has_come) return hear(turns().under_way.back().round);
}

}  // namespace lockstep
