#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/diloco.h>

#include "data_parallel/replica_state.h"
#include "diloco/claim.h"
#include "diloco/exchange.h"
#include "diloco/finite.h"
#include "diloco/islands.h"
#include "diloco/machines.h"
#include "diloco/outer_fragment.h"

namespace lockstep {

/// The turns of the fragments: which is sent when, and when its result is applied.
///
///     step t                 the fragment's turn: begin() sends what the machine has learned, in a Round
///     t + overlap / 2        continue_round(): means are sent, where machines have added up parts
///     t + overlap            end_round(): the outer optimizer's step; parameters are set
struct DiLoCo::State {
  /// Every rank makes it.
  State(Replica& of, const Group& group, DiLoCoOptions given);

  bool step();
  /// `leaves`: nothing follows.
  void finish(bool leaves);
  StateDict state_dict();
  void load_state_dict(const StateDict& state);
  void load_from_ranks(const std::vector<StateDict>& ranks);
  bool fits_ranks(const StateDict& state) const;

  /// Warns if machines are left with different parameters.
  void warn_unless_finished() const;

  DiLoCoStats stats;

 private:
  struct Round {
    size_t fragment;
    int64_t sent_at;
    std::optional<diloco::Exchange> exchange;  ///< on ranks with a slice
  };

  std::vector<diloco::OuterFragment> make_fragments();
  void check_usable() const;
  /// Remembers the parameters that are frozen in this step, as they may train again by their fragment's turn.
  void note_frozen();
  /// Whether this machine can send a fragment. Every rank of the machine calls it and gets the same answer.
  diloco::Standing agree(size_t fragment, const at::Tensor& values) const;
  Round begin(size_t fragment);
  void continue_round(Round& round);
  /// `keep`: the share of the machine's own values in the parameters.
  void end_round(Round& round, double keep);
  /// Returns the same outcome on all ranks of the machine.
  diloco::Outcome outcome_of(Round& round);
  void count(const diloco::Outcome& outcome, int64_t sent_at);
  /// Sets the fragment's parameters from the outer copy. Every rank of the machine calls it. Throws Error, and leaves
  /// the parameters as they are, if the copy has numbers that they cannot hold: then on all ranks of all machines.
  void write(size_t fragment, double keep);

  /// The rounds among machines that come and go, and the way into them.
  class AmongIslands;
  class IslandEntry;
  /// Parameters that are not trained, and buffers.
  std::vector<at::Tensor> others() const;
  /// This machine, the number of machines, this rank's slice or -1, the number of slices.
  std::vector<int64_t> place() const;
  /// Throws Error if a saved state is of another place or model.
  void check_state(const StateDict& state) const;

  /// The options as ranks compare them, and as a state has them.
  std::string described() const;

  ReplicaState& model_;
  struct {
    std::weak_ptr<const bool> is_alive;
    std::optional<diloco::Claim> claim;  ///< no other DiLoCo may have it
    int attachments;                     ///< another number after a refresh()
    uint64_t left_out;                   ///< OuterCopiesLeftOut::times of states that do not matter here
  } held_;                               ///< of the model, when this was made
  const DiLoCoOptions options_;
  const std::vector<std::string> names_;                        ///< of the model's trained parameters
  const std::vector<std::vector<size_t>> fragment_parameters_;  ///< places in the model's trained parameters
  const diloco::Machines machines_;
  std::vector<diloco::OuterFragment> fragments_;
  std::string agreed_;                          ///< lines of options that are the same on all ranks
  std::vector<std::optional<int32_t>> frozen_;  ///< by fragment: a parameter that a step saw frozen
  std::deque<Round> under_way_;
  int64_t saved_at_ = 0;  ///< the step of the last state_dict()
  diloco::EmptyRounds empty_rounds_;
  std::string problem_;                       ///< why no round is possible any more; empty: they are
  std::unique_ptr<diloco::Islands> islands_;  ///< null without `lockstep run --islands`
};

}  // namespace lockstep
