#include "launch/option_values.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "launch/launch_error.h"
#include "launch/plan.h"

namespace lockstep {
namespace {

[[noreturn]] void refuse(const std::string& option, const std::string& wanted, const std::string& text) {
  throw LaunchError(kExitBadCommandLine, option + " takes " + wanted + "; it got '" + text + "'");
}

/// The number that forms all of `text`; throws `error` otherwise.
template <typename Number>
Number read(std::string_view text, Number error) {
  Number number{};
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
  return code == std::errc() && end == text.data() + text.size() ? number : error;
}

}  // namespace

std::chrono::milliseconds parse_seconds(const std::string& option, const std::string& text, bool may_be_off) {
  if (may_be_off && text == "off") return kNever;
  const double milliseconds = 1000 * read(text, -1.0);
  if (!(milliseconds >= 1 && milliseconds <= static_cast<double>(kNever.count())))
    refuse(option,
           std::string("a number of seconds from 0.001 to ") + std::to_string(kNever.count() / 1000) +
               (may_be_off ? ", or off" : ""),
           text);
  return std::chrono::milliseconds(std::llround(milliseconds));
}

int parse_number(const std::string& option, const std::string& text, int minimum, int maximum) {
  const int number = read(text, minimum - 1);
  if (number < minimum || number > maximum)
    refuse(option, "a whole number from " + std::to_string(minimum) + " to " + std::to_string(maximum), text);
  return number;
}

RankRange parse_range(const std::string& option, const std::string& text) {
  const std::string_view words = text;
  const size_t colon = std::min(words.find(':'), words.size());
  const RankRange range{read(words.substr(0, colon), 0), read(words.substr(std::min(colon + 1, words.size())), 0)};
  if (range.min < 1 || range.max < range.min || range.max > kMaxRanks)
    refuse(option, "MIN:MAX, the smallest and the largest number of ranks, such as 2:4", text);
  return range;
}

std::vector<int> parse_ranks(const std::string& option, const std::string& text, int ranks) {
  const std::string wanted = "all, or ranks from 0 to " + std::to_string(ranks - 1) + " such as 0 or 0,2-5";
  std::vector<int> chosen;
  if (text == "all")
    for (int rank = 0; rank < ranks; ++rank) chosen.push_back(rank);
  for (size_t start = 0; text != "all" && start <= text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    const std::string_view part = std::string_view(text).substr(start, end - start);
    const size_t dash = std::min(part.find('-'), part.size());
    const int first = read(part.substr(0, dash), -1);
    const int last = dash == part.size() ? first : read(part.substr(dash + 1), -1);
    if (first < 0 || last < first || last >= ranks) refuse(option, wanted, text);
    for (int rank = first; rank <= last; ++rank) chosen.push_back(rank);
    start = end + 1;
  }
  std::sort(chosen.begin(), chosen.end());
  chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  return chosen;
}

void check_variable(const std::string& option, const std::string& text) {
  const size_t equals = text.find('=');
  if (equals == std::string::npos || equals == 0) refuse(option, "NAME=value", text);
  const std::string name = text.substr(0, equals);
  if (is_launchers_variable(name) || name == "LOCKSTEP_ISLAND")  // the latter by the agent of --islands
    throw LaunchError(kExitBadCommandLine, option + " " + text + ": " + name + " is set by the launcher; leave it out");
}

}  // namespace lockstep
