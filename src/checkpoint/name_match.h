#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// The prefix to remove from names so that more of them are among `own`: the longest run of the prefixes that
/// Python's wrappers leave (`module.`, `_orig_mod.`), or "" if they match as they are or nothing helps.
std::string prefix_to_remove(const std::vector<std::string>& own, const std::vector<std::string>& given);

/// `name` without the prefix, if it starts with it.
std::string without(const std::string& prefix, const std::string& name);

/// The one of `candidates` that differs from `name` in the fewest letters, or "" if none is near: at most a third
/// of the letters, or one ends with the other.
std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates);

}  // namespace lockstep
