#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

/// The script that a program is given: the first argument that ends in .py or .sh. Empty: there is none.
std::string script_of(const std::vector<std::string>& command);

/// SHA-256, as digits, of the program and of its script, so that machines with other copies are found out. Empty: the
/// program cannot be read.
std::string program_hash(const std::string& program, const std::vector<std::string>& command);

}  // namespace lockstep::hosts
