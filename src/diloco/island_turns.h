#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "diloco/buffer_average.h"

namespace lockstep::diloco {

/// A fragment that a machine of `lockstep run --islands` has sent, until its parameters are set.
struct SentFragment {
  int64_t round = 0;
  size_t fragment = 0;
  int64_t sent_at = 0;  ///< a step
  bool is_finite = true;
  bool waits = false;                      ///< for the result, and sets the parameters at once
  bool has_come = false;                   ///< the mean is in the outer copy
  int64_t bytes = 0;                       ///< of what was sent
  at::Tensor rest_before{};                ///< OuterFragment::rest(); undefined without error feedback
  std::optional<BufferAverage> buffers{};  ///< which came with it
};

/// When a machine of `lockstep run --islands` sends which fragment.
///
/// The number of a round decides its fragment, so machines that count other steps, or come back, send the same one as
/// the others: the last fragment in round 1, then the one before it, and again the last after the first. In a training
/// that nothing disturbs these are the turns that fragments have without --islands: fragment f is sent in the steps s
/// in which s + f * sync_every / fragments is a multiple of sync_every.
class IslandTurns {
 public:
  IslandTurns(int64_t sync_every, int64_t fragments, int64_t overlap_steps)
      : every_(sync_every),
        count_(fragments),
        overlap_(overlap_steps),
        repeats_until_(static_cast<size_t>(fragments)) {}

  int64_t fragments() const { return count_; }
  /// Whether fragments take turns, or travel while training continues.
  bool stream() const { return count_ > 1 || overlap_ > 0; }
  size_t fragment_of(int64_t round) const { return static_cast<size_t>((count_ - round % count_) % count_); }
  /// The round to which this machine contributes next. `closed`: the last one of which it knows the result.
  int64_t next_round(int64_t closed) const;

  /// The step of the next turn; of one, too, that sends nothing.
  int64_t at() const { return at_; }
  /// From a checkpoint.
  void set_at(int64_t step) { at_ = step; }
  /// This machine begins, or goes on, together with all others. The last round is `closed`.
  void start(int64_t step, int64_t closed);
  /// It has sent a fragment in a round.
  void go_on(int64_t step, int64_t round) { at_ = step + steps_after(round); }
  /// It has joined the others, or was late: it contributes early, so that they need not wait for it; then it is in step
  /// with them.
  void come_soon(int64_t step) { at_ = step + part_of_turn(2); }
  /// It repeats steps, and reads what the others send.
  void follow(int64_t step);

  /// The step up to which the outer copy has this machine's work in each fragment: until then it repeats steps.
  const std::vector<int64_t>& repeats_until() const { return repeats_until_; }
  void set_repeats(std::vector<int64_t> until, int64_t step);
  bool is_repeating(int64_t step) const;

  /// In the order of their rounds.
  std::deque<SentFragment> under_way{};
  /// Null if there is none.
  SentFragment* of_round(int64_t round);
  SentFragment* of_fragment(size_t fragment);
  void drop(int64_t round);
  /// Whether the fragment that was sent first is due.
  bool is_due(int64_t step) const { return !under_way.empty() && under_way.front().sent_at + overlap_ <= step; }

 private:
  /// From the turn of a round's fragment to that of the next one.
  int64_t steps_after(int64_t round) const;
  int64_t offset_of(size_t fragment) const { return static_cast<int64_t>(fragment) * every_ / count_; }
  int64_t part_of_turn(int64_t parts) const { return std::max<int64_t>(1, every_ / count_ / parts); }
  /// No later than the end of the steps that it repeats for a fragment.
  void stop_at_repeats(int64_t step);

  const int64_t every_, count_, overlap_;
  int64_t at_ = 0;
  std::vector<int64_t> repeats_until_;
};

}  // namespace lockstep::diloco
