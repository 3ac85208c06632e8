#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Throws LimitError unless `count` more descriptors can be opened now. It tries, and closes them again. `what` is what
/// needs them ("forming a group of 2 ranks"). The text says how many are allowed, open and needed.
void require_descriptors(size_t count, const std::string& what);

/// throw_errno(what), but throws LimitError if the process or the system has no descriptor left.
[[noreturn]] void throw_errno_or_limit(const std::string& what);

}  // namespace lockstep
