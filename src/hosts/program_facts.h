#pragma once

#include <string>
#include <vector>

namespace lockstep::hosts {

/// The script passed to a program: the first argument that ends in.py or.sh. Empty if none.
std::string script_of(const std::vector<std::string>& command);

/// SHA-256, in hexadecimal, of the program and of its script, so that machines with other copies are detected. Empty if
/// the program cannot be read.
std::string program_hash(const std::string& program, const std::vector<std::string>& command);

}  // namespace lockstep::hosts
