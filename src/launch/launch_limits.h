#pragma once

#include <cstddef>
#include <string>

namespace lockstep {

/// Throws LaunchError (resource limit) that says what could not be done and why, by errno; for descriptors how many
/// this process may have, how many it has, and how many it needs.
[[noreturn]] void throw_limit(const std::string& what);

/// Throws the same unless this process can open so many more descriptors, which `what` takes.
void require_for_launch(size_t descriptors, const std::string& what);

}  // namespace lockstep
