#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "reducer/facts.h"

namespace lockstep {

/// A program's settings of a replica, equal on every rank.
struct ReplicaSettings {
  int check_every = 0;
  bool buffers_as_left = false;
  enum class Join { kOutside, kSwitchedOff, kInside } join = Join::kOutside;
  bool divide_by_initial_world_size = true, throw_on_early_termination = false;
  uint64_t frozen = 0;  ///< a hash of the followed parameters that no longer require grad; 0: none

  /// The settings as this rank's reduction number `reduction` tells them.
  Facts::Settings told(uint64_t reduction) const;
  /// One line for each setting except `frozen`.
  std::string text() const;
};

struct ReductionEvents {
  /// Called before each reduction. Returns the error of this rank's replica; empty if none.
  std::function<std::string()> inspect;
  /// Called after inspect(), if this rank has inputs. Returns the settings that every rank must share. May be null.
  std::function<ReplicaSettings()> settings = nullptr;
  /// The names of the parameters that settings() counts as frozen, in the model's order. Set if settings() is.
  std::function<std::vector<std::string>()> frozen = nullptr;
  std::function<void(const std::vector<Facts>& ranks)> reduced;
  /// Called before this rank takes part in a reduction with gradients. May be null.
  std::function<void()> reducing = nullptr;
  /// Called when a virtual rank of several has finished its part of the step. May be null. `last`: the last one of this
  /// process.
  std::function<void(bool took_part, bool last)> virtual_rank_done = nullptr;
  /// Called when a backward begins, on any thread. May be null. Returns the error that all ranks must throw; empty if
  /// none. `gradients_wait`: gradients of earlier backward passes wait for an optimizer's step, which takes their sum.
  std::function<std::string(bool gradients_wait)> backward_begins = nullptr;
};

}  // namespace lockstep
