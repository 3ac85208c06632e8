#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

/// SHA-256, as digits, of the program and of the script that it is given first (the first argument that ends in .py or
/// .sh), so that machines with other copies are found out. Empty: the program cannot be read.
std::string program_hash(const std::string& program, const std::vector<std::string>& command);

/// The name of this machine's processor, as the kernel has it.
std::string processor_name();

}  // namespace lockstep::hosts
