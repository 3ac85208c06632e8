#pragma once

#include <string>

namespace lockstep {

/// This machine's own name, as it gives it.
std::string host_name();

/// Identifies the running kernel: the same for all processes of one machine.
std::string boot_id();

/// Distinguishes machines, and network namespaces, which communicate like separate machines. LOCKSTEP_MACHINE divides
/// one machine into several.
std::string machine_name();

}  // namespace lockstep
