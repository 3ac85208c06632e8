#include "base/first_difference.h"

#include <algorithm>
#include <sstream>

#include "base/rank_names.h"

namespace lockstep {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::string first_difference(const std::string& kind, const std::vector<std::string>& descriptions) {
  std::vector<std::vector<std::string>> lists;
  size_t longest = 0;
  for (const auto& description : descriptions) {
    lists.push_back(lines_of(description));
    longest = std::max(longest, lists.back().size());
  }
  for (size_t i = 0; i < longest; ++i) {
    std::vector<std::string> at_i;
    for (const auto& list : lists)
      at_i.push_back(i < list.size() ? list[i] : "nothing (it has " + std::to_string(list.size()) + ")");
    const auto other = std::find_if(at_i.begin(), at_i.end(), [&](const auto& line) { return line != at_i.front(); });
    if (other == at_i.end()) continue;
    return kind + " " + std::to_string(i) + " is `" + at_i.front() + "` on " + ranks_with(at_i, at_i.front()) +
           " and `" + *other + "` on " + ranks_with(at_i, *other);
  }
  return "";
}

}  // namespace lockstep
