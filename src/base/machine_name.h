#pragma once

#include <string>

namespace lockstep {

/// Distinguishes machines, and network namespaces, which communicate like separate machines. LOCKSTEP_MACHINE divides
/// one machine into several.
std::string machine_name();

}  // namespace lockstep
