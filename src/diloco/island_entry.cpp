#include "diloco/island_entry.h"

#include <algorithm>
#include <chrono>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "collectives/cause.h"
#include "collectives/coalesced.h"
#include "diloco/buffer_average.h"
#include "diloco/island_state.h"
#include "diloco/wire_format.h"

namespace lockstep {
namespace {

using diloco::OuterFragment;
using diloco::SentFragment;

}  // namespace

void DiLoCo::State::IslandEntry::check() const {
  const std::string name = "DiLoCo: `lockstep run --islands`";
  TORCH_CHECK(s_.machines_.count() == 1, name, " makes each machine a run of its own, and this group has ",
              s_.machines_.count(), " machines; start the program with one or the other");
  int64_t largest = 0, state = 0;
  for (const OuterFragment& fragment : s_.fragments_) {
    largest = std::max(largest, diloco::encoded_bytes(s_.options_.wire, fragment.slice()) * s_.machines_.slices());
    state += fragment.slice() * s_.machines_.slices() * diloco::kMostInIslandState;
  }
  const int64_t round = (largest + diloco::bytes_of_buffers(s_.model_.attached.buffers())) * s_.islands_->count();
  for (const at::Tensor& other : s_.others()) state += static_cast<int64_t>(other.nbytes());
  TORCH_CHECK(std::max(round, state) < static_cast<int64_t>(hub::kMostBytes), name,
              " sends messages of at most 3.75 GiB; the outer state of this model may take ", state,
              " bytes, and a round of all machines ", round, "; train a smaller model, or leave --islands out");
}

std::string DiLoCo::State::IslandEntry::model_and_options() const {
  std::ostringstream text;
  text << s_.agreed_ << "ranks " << s_.machines_.slices() << '\n';
  for (const auto& [name, tensor] : s_.model_.attached.trained())
    text << "parameter " << name << ' ' << tensor.scalar_type() << ' ' << tensor.sizes() << '\n';
  for (const auto& [name, buffer] : s_.model_.attached.buffers())
    text << "buffer " << name << ' ' << buffer.scalar_type() << ' ' << buffer.sizes() << '\n';
  return text.str();
}

void DiLoCo::State::IslandEntry::give_state() const {
  const bool has_others = s_.machines_.here().rank() == 0;
  s_.islands_->give(s_.stats.rounds,
                    diloco::bytes_of_island_state(s_.fragments_, s_.empty_rounds_,
                                                  has_others ? s_.others() : std::vector<at::Tensor>()));
}

void DiLoCo::State::IslandEntry::take_state(const std::string& bytes, bool with_others) {
  const auto others = with_others ? s_.others() : std::vector<at::Tensor>();
  const bool reads_others = s_.machines_.here().rank() == 0;
  const std::string problem = failure_of([&] {
    diloco::load_island_state(s_.islands_->slice_of(bytes), s_.fragments_, s_.empty_rounds_,
                              reads_others ? others : std::vector<at::Tensor>());
  });
  // Each rank has read a slice of its own.
  for (const std::string& one : s_.machines_.here().all_gather_bytes(problem))
    if (!one.empty()) throw Error(one);
  if (!others.empty() && s_.machines_.here().world_size() > 1) broadcast_weights(s_.machines_.here(), others, 0);
}

void DiLoCo::State::IslandEntry::join() {
  const auto start = std::chrono::steady_clock::now();
  if (s_.stats.rounds == 0 && s_.islands_->count() > 1 && !diloco::has_asked_for_island_shard())
    s_.islands_->warn(
        ": island_shard() was not called, so all machines of --islands may read the same data; give its Shard to the "
        "DataLoader");
  const auto joined = s_.islands_->join(s_.stats.rounds, model_and_options());
  if (joined.state)
    take_place(joined);
  else
    give_state();
  s_.stats.wait_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const int64_t now = s_.stats.steps;
  joined.starts ? turns().start(now, s_.stats.rounds) : turns().come_soon(now);
  std::vector<int64_t> counted;
  for (const auto& one : joined.counted) counted.push_back(one.step);
  turns().set_repeats(std::move(counted), now);
}

void DiLoCo::State::IslandEntry::take_place(const diloco::Islands::Joined& joined) {
  const int64_t had = s_.stats.rounds, now = s_.stats.steps;
  int64_t counted_step = 0;
  for (const auto& one : joined.counted) counted_step = std::max(counted_step, one.step);
  if (joined.starts && joined.round > had)
    s_.islands_->warn((had > 0 ? " goes on from a checkpoint after round " + std::to_string(had)
                               : " has no checkpoint and begins at step " + std::to_string(now)) +
                      ", and another one goes on from round " + std::to_string(joined.round) +
                      ": what it had contributed between is trained again");
  if (now < counted_step)
    s_.islands_->warn(" comes back at step " + std::to_string(now) + ", and its work up to step " +
                      std::to_string(counted_step) +
                      " is in the outer copy: it repeats these steps, and sends nothing of "
                      "them; save a checkpoint whenever step() returns true to have fewer of them");
  std::vector<Own> own;
  for (const OuterFragment& fragment : s_.fragments_) own.push_back(own_of(fragment));
  // Machines that go on together from their checkpoints have their own.
  const bool goes_on = turns().stream() && had > 0 && had == joined.round;
  take_state(*joined.state, /*with_others=*/!goes_on);
  s_.stats.rounds = joined.round;
  for (size_t which = 0; which < s_.fragments_.size(); ++which) {
    const diloco::Islands::Counted& counted = joined.counted[which];
    if (now <= counted.step || had < counted.round)
      continue_from_outer(which, counted.step);
    else
      keep_own(which, own[which]);
  }
}

DiLoCo::State::IslandEntry::Own DiLoCo::State::IslandEntry::own_of(const OuterFragment& fragment) const {
  Own own{.learned = fragment.learned(s_.machines_), .sent_at = fragment.sent_at()};
  if (!turns().stream()) return own;
  own.outer = fragment.whole(s_.machines_).clone();
  if (fragment.rest().defined()) own.rest = fragment.rest().clone();
  return own;
}

void DiLoCo::State::IslandEntry::continue_from_outer(size_t which, int64_t counted_step) {
  // With an overlap it may have trained since.
  const bool is_ahead = s_.options_.overlap_steps > 0 && s_.stats.steps > counted_step;
  std::erase_if(turns().under_way, [&](const SentFragment& one) { return one.fragment == which; });
  s_.write(which, is_ahead ? s_.options_.mixing : 0);
  s_.fragments_[which].set_sent_at(is_ahead ? counted_step : s_.stats.steps);
}

void DiLoCo::State::IslandEntry::keep_own(size_t which, const Own& own) {
  const at::NoGradGuard no_grad;
  OuterFragment& fragment = s_.fragments_[which];
  const bool is_under_way = turns().of_fragment(which) != nullptr;  // its parameters are set when it is due
  if (!is_under_way && !(own.outer.defined() && at::equal(own.outer, fragment.whole(s_.machines_)))) {
    fragment.move(s_.machines_, own.learned);
    fragment.set_sent_at(-1);
    return;
  }
  fragment.set_sent_at(own.sent_at);
  if (own.rest.defined()) at::Tensor(fragment.rest()).copy_(own.rest);
}

}  // namespace lockstep
