#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reducer/facts.h"

namespace lockstep {

/// What a program sets for a replica, alike on every rank.
struct ReplicaSettings {
  int check_every = 0;
  bool buffers_as_left = false;
  enum class Join { kOutside, kSwitchedOff, kInside } join = Join::kOutside;
  bool divide_by_initial_world_size = true, throw_on_early_termination = false;
  uint64_t frozen = 0;  ///< a hash of the followed parameters that require no grad any more; 0: none

  /// As every reduction tells it, the number `reduction` of this rank.
  Facts::Settings told(uint64_t reduction) const;
  /// One line for each, but for `frozen`.
  std::string text() const;
};

struct ReductionEvents {
  /// Before each reduction: returns the error of this rank's replica; empty if none.
  std::function<std::string()> inspect;
  /// After inspect(), if this rank has inputs: what every rank must have set alike; may be null.
  std::function<ReplicaSettings()> settings = nullptr;
  /// The names of the parameters that settings() counts as frozen, in the model's order. Set if settings() is.
  std::function<std::vector<std::string>()> frozen = nullptr;
  /// After each reduction, on all ranks.
  std::function<void(const std::vector<Facts>& ranks)> reduced;
  /// Before this rank takes part in a reduction with gradients; may be null.
  std::function<void()> reducing = nullptr;
  /// A virtual rank of several has finished its part of the step; may be null. `last`: the last one of this process.
  std::function<void(bool took_part, bool last)> virtual_rank_done = nullptr;
  /// A backward begins, on any thread; may be null. Returns what all ranks must throw; empty if nothing.
  /// `gradients_wait`: gradients of earlier backward passes wait for an optimizer's step, which takes their sum.
  std::function<std::string(bool gradients_wait)> backward_begins = nullptr;
};

}  // namespace lockstep
