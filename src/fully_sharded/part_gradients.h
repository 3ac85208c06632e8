#pragma once

#include <deque>
#include <string>

#include "fully_sharded/unit.h"

// Tracks the gradients in parts between a backward and the step that uses them. Each rank has other elements, so code
// that needs all of them, such as a norm, is wrong for one rank's.

namespace lockstep::fully_sharded {

/// Marks the gradients as this library leaves them.
void mark_gradients(std::deque<Unit>& units);

struct GradientChanges {
  std::string changed;  ///< name of the first that other code has changed; empty: none
  bool zeroed = false;  ///< all of this rank's are zeros, as after zero_grad(false), and were not marked as zeros
  bool kept = false;    ///< some of this rank's are unchanged since marked
};
GradientChanges changes_of_gradients(const std::deque<Unit>& units);

}  // namespace lockstep::fully_sharded
