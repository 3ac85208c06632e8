#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

// What the options of `lockstep run` say. All throw LaunchError (bad command line) that names option, value and mend.

/// A number of seconds, decimals allowed, of at least one millisecond and at most kNever; "off" is kNever where
/// `may_be_off`.
std::chrono::milliseconds parse_seconds(const std::string& option, const std::string& text, bool may_be_off);

/// A whole number of [minimum, maximum].
int parse_number(const std::string& option, const std::string& text, int minimum, int maximum);

/// Ranks out of `ranks`: "all", or numbers and ranges ("0,2-5"). Ascending, each once.
std::vector<int> parse_ranks(const std::string& option, const std::string& text, int ranks);

/// Refuses what is no NAME=value, and names whose value is the launcher's to give.
void check_variable(const std::string& option, const std::string& text);

}  // namespace lockstep
