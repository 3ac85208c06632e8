#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// A line for each tensor, number and text in `state`, in order: where it is, a tab, and what it is, of tensors a hash
/// of every bit with dtype and shape. Equal states, equal lines. Whatever else an IValue may hold counts by its kind.
std::string lines_of_state(const c10::IValue& state);

/// The first line that is not the same on all ranks, in words: "averages.0.weight on rank 1 is not what it is on
/// ranks 0, 2"; "" if all are. Element r is rank r's lines.
std::string difference_of_lines(const std::vector<std::string>& ranks);

}  // namespace lockstep
