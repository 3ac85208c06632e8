#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/state_dict.h>

namespace lockstep {

class Group;

namespace detail {

/// Elements [begin, end) of a tensor without gaps, in the order of memory.
struct ElementRange {
  at::Tensor tensor;
  int64_t begin = 0, end = 0;
};

/// Something of whose state each rank has memory only for a slice. A Checkpointer saves it piece by piece.
class StateInSlices {
 public:
  virtual ~StateInSlices() = default;
  /// The group whose ranks have the slices; null: unknown.
  virtual const Group* slice_holders() const { return nullptr; }
  /// Tensors with their whole shapes, of which this rank has its slice (src/checkpoint/sliced_memory.h).
  /// REQUIRES: every rank calls it.
  virtual StateDict state_in_slices() = 0;
  /// The elements that load_state_dict(state) uses on this rank. The others may then be anything. Reads no values.
  virtual std::vector<ElementRange> elements_to_load(const StateDict& state) const = 0;
  /// Takes what this rank needs of a whole state, of which it reads a piece at a time.
  /// REQUIRES: every rank calls it with the same state.
  virtual void load_state_dict(const StateDict& state) = 0;
};

}  // namespace detail
}  // namespace lockstep
