#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "diloco/finite.h"
#include "diloco/outer_fragment.h"

// The outer state that a machine of `lockstep run --islands` gives another: this rank's slices of all fragments, the
// last rounds in which no machine was finite, and what is not trained.

namespace lockstep::diloco {

/// The bytes that a number of a slice takes at most: of the copy, two of an optimizer like Adam, what rounding lost,
/// and its mean.
constexpr int64_t kMostInIslandState = 5 * sizeof(float);

/// `others`: the tensors that are not trained, on one rank; empty on the further ones.
std::string bytes_of_island_state(const std::vector<OuterFragment>& fragments, const EmptyRounds& empty_rounds,
                                  const std::vector<at::Tensor>& others);
/// The reverse. What rounding lost is zero then, since it was the other machine's. Throws Error, before it changes
/// anything, if the state is of another model or another Lockstep.
void load_island_state(const std::string& bytes, std::vector<OuterFragment>& fragments, EmptyRounds& empty_rounds,
                       const std::vector<at::Tensor>& others);

}  // namespace lockstep::diloco
