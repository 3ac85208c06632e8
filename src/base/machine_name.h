#pragma once

#include <string>

namespace lockstep {

/// Distinguishes machines, and network namespaces, which are machines to everything that communicates. LOCKSTEP_MACHINE
/// makes several of one.
std::string machine_name();

}  // namespace lockstep
