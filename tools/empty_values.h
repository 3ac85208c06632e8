#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

namespace lockstep {

/// Throws LaunchError (bad command line) if an option of `command` has an empty value, before `words` are parsed: a
/// script's variable that is not set would otherwise count as an option that is not given, and CLI11 takes the word
/// after
/// "--name=" as its value. Ends at "--".
void refuse_empty_options(const CLI::App& command, const std::vector<std::string>& words);

/// The same for arguments without a name, after they are parsed.
void refuse_empty_arguments(const CLI::App& command);

}  // namespace lockstep
