#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// A line for each tensor, number and string in `state`, in order: where it is, a tab, and its value, for tensors a
/// hash of every bit with dtype and shape. Equal states, equal lines. Of other IValues only the kind counts.
/// `in_slices`: of memory that lies in slices on the ranks there is nothing to compare but dtype and shape.
std::string lines_of_state(const c10::IValue& state, bool in_slices = false);

/// The first line that differs between ranks, in words: "averages.0.weight on rank 1 is not what it is on
/// ranks 0, 2"; "" if none does. Element r is rank r's lines.
std::string difference_of_lines(const std::vector<std::string>& ranks);

/// "ranks save different steps: 1 on rank 0 and 2 on rank 1; every rank must make the same call"; "" if all are the
/// same. `what`: up to the colon. Element r is rank r's.
std::string difference_of_calls(const std::string& what, const std::vector<std::string>& ranks);

}  // namespace lockstep
