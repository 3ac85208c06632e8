#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The reason why a state's tensor holds no numbers that could be copied; "" if it does.
std::string problem_of_given(const at::Tensor& given);

/// The reason why `given` cannot be copied to `own`, whatever its shape; "" if it can. `where` is, for example, "the
/// module". A state is checked as a whole before the first of its tensors is copied, so that an error changes nothing.
std::string problem_of_copy(const at::Tensor& given, const at::Tensor& own, const std::string& where);

/// The prefix to remove from names so that more of them are among `own`: the longest sequence of the prefixes that
/// Python's wrappers add (`module.`, `_orig_mod.`); "" if the names match unchanged or no prefix helps.
std::string prefix_to_remove(const std::vector<std::string>& own, const std::vector<std::string>& given);

/// `name` without the prefix, if it starts with it.
std::string without(const std::string& prefix, const std::string& name);

/// The candidate that differs from `name` in the fewest letters, or "" if none is near: at most a third of the letters
/// differ, or one ends with the other.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace lockstep
