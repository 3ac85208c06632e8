#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Dict.h>
#include <ATen/core/Tensor.h>

#include "checkpoint/checkpoint_part.h"
#include "checkpoint/memory/image_slices.h"
#include "checkpoint/memory/memory_slots.h"

namespace lockstep {

/// A checkpoint that is being resumed, on disk or in memory.
struct CheckpointImage {
  c10::impl::GenericDict whole = new_dict();  ///< parts with one state for all ranks, and the step
  size_t ranks = 0;                           ///< that saved it
  std::function<c10::impl::GenericDict(size_t rank)> state_of_rank;
};

/// A state in the launcher's memory, open. What parts that lie in slices use of it is still to be brought
/// (memory_bringer.h).
struct OpenSlot {
  /// A storage of the common image that is not read: zeros, as large as it is.
  struct Partial {
    uint64_t begin = 0;  ///< in the common image
    at::Tensor bytes;
  };

  WholeSlot slot;
  ImageSlices slices;
  CheckpointImage image;
  std::vector<Partial> partial;
};

/// Reads the ranks' states in the launcher's memory. `memory` outlives this and the images.
class SlotReader {
 public:
  /// `owner` selects the states to read.
  SlotReader(const SlotMemory& memory, uint64_t owner) : memory_(memory), owner_(owner) {}

  /// The newest states that are whole and readable, at most `most`. Warns of states that cannot be read.
  std::vector<WholeSlot> intact(size_t most) const;
  /// The slices of its common image.
  ImageSlices slices(const WholeSlot& slot) const;
  /// Opens the slot with that sequence. Throws RefusedInput if it is not whole. `is_partial`: whether the storages of
  /// the part with this name are not to be read, as those in slices never are.
  OpenSlot open(uint64_t sequence, const std::function<bool(const std::string& part)>& is_partial) const;

 private:
  std::string problem_of(const WholeSlot& slot) const;

  const SlotMemory& memory_;
  const uint64_t owner_;
};

}  // namespace lockstep
