#pragma once

#include <deque>
#include <string>

#include "fully_sharded/unit.h"

// What happens to the gradients in parts between a backward and the step that uses them. Each rank has other elements,
// so what looks at all of them, as a norm does, is wrong for one rank's.

namespace lockstep::fully_sharded {

/// The gradients are as this library leaves them.
void mark_gradients(std::deque<Unit>& units);

struct GradientChanges {
  std::string changed;  ///< the name of the first that something else has changed; empty: none
  bool zeroed = false;  ///< all of this rank's are zeros, as zero_grad(false) leaves them, and were not marked so
  bool kept = false;    ///< some of this rank's are as they were marked
};
/// Since mark_gradients().
GradientChanges changes_of_gradients(const std::deque<Unit>& units);

}  // namespace lockstep::fully_sharded
