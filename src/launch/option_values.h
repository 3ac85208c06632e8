#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

/// The number of ranks that a run may have.
struct RankRange {
  int min = 1;
  int max = 1;
  bool contains(int ranks) const { return min <= ranks && ranks <= max; }
};

// Parsers for the values of options of `lockstep run`. All throw LaunchError (bad command line) with the option, the
// value and the expected form.

/// A number of seconds, decimals allowed, from one millisecond to kNever; "off" is kNever if `may_be_off`.
std::chrono::milliseconds parse_seconds(const std::string& option, const std::string& text, bool may_be_off);

/// An integer in [minimum, maximum].
int parse_number(const std::string& option, const std::string& text, int minimum, int maximum);

/// "2:4".
RankRange parse_range(const std::string& option, const std::string& text);

/// Ranks out of `ranks`: "all", or numbers and ranges ("0,2-5"). Ascending, each once.
std::vector<int> parse_ranks(const std::string& option, const std::string& text, int ranks);

/// Refuses text that is not NAME=value, and names that the launcher sets itself.
void check_variable(const std::string& option, const std::string& text);

}  // namespace lockstep
