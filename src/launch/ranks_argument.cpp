#include "launch/ranks_argument.h"

#include <map>
#include <string_view>

#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "launch/plan.h"

namespace lockstep {
namespace {

constexpr std::string_view kOptions[] = {"--ranks", "--hang-timeout", "--grace"};

/// The option that `word` is, or begins with before a "="; empty: none.
std::string_view option_of(const std::string& word) {
  for (const std::string_view option : kOptions)
    if (word.starts_with(option) && (word.size() == option.size() || word[option.size()] == '=')) return option;
  return {};
}

}  // namespace

std::optional<RanksArgument> find_ranks_argument(const std::vector<std::string>& arguments, int usable_cores) {
  RanksArgument found;
  std::map<std::string_view, std::string> values;
  std::string refused;  // if there is --ranks
  bool ended = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    ended = ended || word == "--";
    const std::string_view option = i == 0 || ended ? std::string_view() : option_of(word);
    if (option.empty()) {
      found.arguments.push_back(word);
      continue;
    }
    const bool joined = word.size() > option.size(), lacks = !joined && i + 1 == arguments.size();
    std::string value = joined ? word.substr(option.size() + 1) : lacks ? "" : arguments[++i];
    const bool again = !values.emplace(option, std::move(value)).second;
    if (!refused.empty()) continue;
    if (lacks) refused = std::string(option) + " has no value";
    if (again) refused = std::string(option) + " is given twice; leave one out";
  }
  const auto ranks = values.find("--ranks");
  if (ranks == values.end()) return std::nullopt;
  if (!refused.empty()) throw LaunchError(kExitBadCommandLine, refused);
  found.ranks = parse_rank_count("--ranks", ranks->second, usable_cores);
  for (const auto& [option, value] : values) {
    if (option == "--hang-timeout") found.hang_timeout = parse_seconds("--hang-timeout", value, true);
    if (option == "--grace") found.grace = parse_seconds("--grace", value, false);
  }
  return found;
}

}  // namespace lockstep
