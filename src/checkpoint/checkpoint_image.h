#pragma once

#include <cstddef>
#include <functional>

#include <ATen/core/Dict.h>

#include "checkpoint/checkpoint_part.h"

namespace lockstep {

/// A checkpoint that is being resumed, on disk or in memory.
struct CheckpointImage {
  c10::impl::GenericDict whole = new_dict();  ///< parts with one state for all ranks, and the step
  size_t ranks = 0;                           ///< that saved it
  std::function<c10::impl::GenericDict(size_t rank)> state_of_rank;
};

}  // namespace lockstep
