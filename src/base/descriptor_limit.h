#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Throws LimitError unless `count` more descriptors can be opened now; tests this by opening and closing them. `what`
/// is the operation that needs them ("forming a group of 2 ranks"). The text has the numbers allowed, open and needed.
void require_descriptors(size_t count, const std::string& what);

/// throw_errno(what), but throws LimitError if the process or the system has no descriptor left.
[[noreturn]] void throw_errno_or_limit(const std::string& what);

}  // namespace lockstep
