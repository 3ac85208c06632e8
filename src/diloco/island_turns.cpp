#include "diloco/island_turns.h"

namespace lockstep::diloco {

int64_t IslandTurns::next_round(int64_t closed) const {
  return std::max(closed, under_way.empty() ? 0 : under_way.back().round) + 1;
}

int64_t IslandTurns::steps_after(int64_t round) const {
  const size_t own = fragment_of(round), next = fragment_of(round + 1);
  return offset_of(own) - offset_of(next) + (own == 0 ? every_ : 0);
}

void IslandTurns::start(int64_t step, int64_t closed) {
  if (stream() && at_ >= step) return;  // as it was before
  // One that begins in the step of its turn has it, where fragments take turns as they do without --islands.
  const int64_t from = step + (stream() ? 0 : 1), offset = offset_of(fragment_of(next_round(closed)));
  at_ = (from + offset + every_ - 1) / every_ * every_ - offset;
}

void IslandTurns::follow(int64_t step) {
  at_ = step + part_of_turn(4);  // it has been behind for long enough
  stop_at_repeats(step);
}

void IslandTurns::set_repeats(std::vector<int64_t> until, int64_t step) {
  repeats_until_ = std::move(until);
  stop_at_repeats(step);
}

void IslandTurns::stop_at_repeats(int64_t step) {
  for (const int64_t until : repeats_until_)
    if (until > step) at_ = std::min(at_, until);
}

bool IslandTurns::is_repeating(int64_t step) const {
  return step <= *std::max_element(repeats_until_.begin(), repeats_until_.end());
}

SentFragment* IslandTurns::of_round(int64_t round) {
  const auto found =
      std::find_if(under_way.begin(), under_way.end(), [&](const SentFragment& one) { return one.round == round; });
  return found == under_way.end() ? nullptr : &*found;
}

SentFragment* IslandTurns::of_fragment(size_t fragment) {
  const auto found = std::find_if(under_way.begin(), under_way.end(),
                                  [&](const SentFragment& one) { return one.fragment == fragment; });
  return found == under_way.end() ? nullptr : &*found;
}

void IslandTurns::drop(int64_t round) {
  std::erase_if(under_way, [&](const SentFragment& one) { return one.round == round; });
}

}  // namespace lockstep::diloco
