#pragma once

#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>

#include "diloco/island_turns.h"
#include "diloco/islands.h"
#include "diloco/rounds.h"

namespace lockstep {

/// Rounds among machines that come and go, under `lockstep run --islands`. The hub (hosts/round_hub.h) collects the
/// encoded pseudo-gradients of one fragment a round, and sends all of a round to every machine.
///
/// Every machine steps its outer copies by all rounds in their order, as soon as it reads their results: so the copies
/// after a round are the same everywhere, and a machine that comes needs no more than the copies of another and the
/// results since. Only the parameters wait for the end of overlap_steps. Results are read in steps that the ranks of a
/// machine agree about without a word: at the turn of a fragment, and where one is due.
///
/// A machine that a round was closed without moves its parameters as the outer copy moves, so that what it has learned
/// is in its next pseudo-gradient of the fragment. The hub remembers the step of each machine's last pseudo-gradient of
/// each fragment: one that comes back at an earlier step repeats the steps between, and sends nothing of them, so that
/// no sample counts twice.
class DiLoCo::State::AmongIslands {
 public:
  explicit AmongIslands(State& state) : s_(state) {}
  bool step() {
    return reported([this] { return make_step(); });
  }
  void finish(bool leaves) {
    reported([this, leaves] { meet(leaves); });
  }
  /// Waits for the results of what was sent, before the outer copies are saved.
  void hear_all() {
    reported([this] { hear_last(); });
  }

 private:
  bool make_step();
  /// Has a round of each fragment now, of what was trained since the last one.
  void meet(bool leaves);
  void hear_last();
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
  void join_islands();
  /// At once, while it knows what it has sent, which the hub may have counted.
  void join_if_out();
  void check_has_not_left(const char* call) const;
  /// Whether each fragment has had a round in this step.
  bool is_met() const;

  /// The round to which this machine contributes next, with a fragment that is not under way.
  int64_t next_round();
  /// Sends the next round's fragment. `waits`: for the result, and sets the parameters.
  void send(bool waits);
  /// Reads the results up to a round's.
  void hear(int64_t round);
  /// Sets the parameters of a fragment that was sent, when its mean is there.
  void settle(int64_t round);
  /// The rounds that were closed while this machine repeats steps.
  void follow();
  void apply_all(const std::vector<diloco::IslandRound>& rounds);
  void apply(const diloco::IslandRound& round);
  at::Tensor mean_of(const diloco::IslandRound& round, size_t which, diloco::BufferAverage& buffers);
  /// What was sent is in no round, as far as this machine knows: it stays in the parameters.
  void take_back(const diloco::SentFragment& sent);
  void take_back_all();
  diloco::IslandTurns& turns() const { return s_.islands_->turns; }

  State& s_;
};

}  // namespace lockstep
