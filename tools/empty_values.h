#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep {

/// Throws LaunchError (bad command line) if an option or argument of `command`, which has been parsed, is empty. A
/// script's variable that is not set would otherwise count as an option that is not given.
void refuse_empty_values(const CLI::App& command);

/// The same before it is parsed, for options of `command` that are written as "--name=": CLI11 would take the next
/// word as their value. Ends at "--".
void refuse_empty_assignments(const CLI::App& command, const std::vector<std::string>& words);

}  // namespace lockstep
