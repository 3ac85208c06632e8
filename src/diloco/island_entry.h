#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "diloco/islands.h"
#include "diloco/rounds.h"

namespace lockstep {

/// A machine's way into the rounds of the others, or back: it takes the outer state of another machine, and decides for
/// each fragment what becomes of its own parameters.
///
///     the outer copy has its work        they become the copy's; with an overlap what it has trained since is mixed in
///     the fragment is under way          they wait until it is due
///     its own copy is the same           they stay as they are, to the bit, where fragments take turns or overlap
///     else                               they move with the copy: what it has learned is sent next time
class DiLoCo::State::IslandEntry {
 public:
  explicit IslandEntry(State& state) : s_(state) {}
  /// TORCH_CHECK fails if the group has several machines, or if messages would be too large.
  void check() const;
  /// Gets the outer state of another machine, or gives its own to all. Every rank calls it.
  /// REQUIRES: nothing is under way whose result has not come.
  void join();
  void give_state() const;

 private:
  /// What a machine has of a fragment before it takes another one's.
  struct Own {
    at::Tensor learned;
    int64_t sent_at = 0;
    at::Tensor outer{}, rest{};  ///< undefined: they do not matter
  };

  void take_place(const diloco::Islands::Joined& joined);
  void take_state(const std::string& bytes, bool with_others);
  Own own_of(const diloco::OuterFragment& fragment) const;
  void continue_from_outer(size_t which, int64_t counted_step);
  void keep_own(size_t which, const Own& own);
  std::string model_and_options() const;
  diloco::IslandTurns& turns() const { return s_.islands_->turns; }

  State& s_;
};

}  // namespace lockstep
