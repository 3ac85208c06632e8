#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Throws LimitError unless `count` more descriptors can be opened now; tries it, and leaves none open. `what` is what
/// takes them ("forming a group of 2 ranks"). The text says how many are allowed, open and needed.
void require_descriptors(size_t count, const std::string& what);

/// throw_errno(what), but LimitError where the system has no descriptor left to give.
[[noreturn]] void throw_errno_or_limit(const std::string& what);

}  // namespace lockstep
