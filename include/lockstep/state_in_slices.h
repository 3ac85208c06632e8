#pragma once

#include <lockstep/cxx20.h>

#include <lockstep/state_dict.h>

namespace lockstep::detail {

/// An object for whose state each rank has memory only for a slice. A Checkpointer saves it piece by piece.
class StateInSlices {
 public:
  virtual ~StateInSlices() = default;
  /// Tensors with their whole shapes, of which this rank has its slice (src/checkpoint/sliced_memory.h).
  /// REQUIRES: every rank calls it.
  virtual StateDict state_in_slices() = 0;
  /// Loads the part that this rank needs of a whole state, reading a piece at a time.
  /// REQUIRES: every rank calls it with the same state.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace lockstep::detail
