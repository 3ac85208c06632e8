#pragma once

#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace lockstep {

/// A line for each tensor, number and string in `state`, in order: its position, a tab, and its value; for tensors, a
/// hash of every bit with dtype and shape. Equal states give equal lines. Other IValues are compared by kind only.
/// `in_slices`: for memory in slices on the ranks, only dtype and shape are compared.
std::string lines_of_state(const c10::IValue& state, bool in_slices = false);

/// Describes the first line that differs between ranks: "averages.0.weight on rank 1 differs from that on ranks 0, 2";
/// "" if none does. Element r holds rank r's lines.
std::string difference_of_lines(const std::vector<std::string>& ranks);

/// "ranks save different steps: 1 on rank 0 and 2 on rank 1; every rank must make the same call"; "" if all are equal.
/// `what` is the text before the colon. Element r is rank r's call.
std::string difference_of_calls(const std::string& what, const std::vector<std::string>& ranks);

}  // namespace lockstep
