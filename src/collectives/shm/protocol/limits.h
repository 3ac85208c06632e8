#pragma once

#include <cstddef>

namespace lockstep::shm {

/// Sizes up to which a method is used; the same on every rank.
struct Limits {
  size_t one_shot;          ///< all_reduce: every rank sums everything, whatever the memory
  size_t private_one_shot;  ///< the same for all_reduce of private buffers
  size_t eager;             ///< all other operations: packages are copied when announced
  /// `crowded`: there are more ranks than processors for them.
  static Limits of(int world_size, bool crowded = false);
};

}  // namespace lockstep::shm
