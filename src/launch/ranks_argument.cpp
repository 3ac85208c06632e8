#include "launch/ranks_argument.h"

#include <string_view>

#include "launch/launch_error.h"
#include "launch/plan.h"

namespace lockstep {
namespace {

constexpr std::string_view kOption = "--ranks";

}  // namespace

std::optional<RanksArgument> find_ranks_argument(const std::vector<std::string>& arguments, int usable_cores) {
  RanksArgument found;
  std::optional<std::string> value;
  bool ended = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    ended = ended || word == "--";
    const bool joined = word.starts_with(kOption) && word.size() > kOption.size() && word[kOption.size()] == '=';
    if (i == 0 || ended || (word != kOption && !joined)) {
      found.arguments.push_back(word);
      continue;
    }
    if (value) throw LaunchError(kExitBadCommandLine, "--ranks is given twice; leave one out");
    if (!joined && i + 1 == arguments.size())
      throw LaunchError(kExitBadCommandLine, "--ranks lacks its value, the number of ranks or auto");
    value = joined ? word.substr(kOption.size() + 1) : arguments[++i];
  }
  if (!value) return std::nullopt;
  found.ranks = parse_rank_count("--ranks", *value, usable_cores);
  return found;
}

}  // namespace lockstep
