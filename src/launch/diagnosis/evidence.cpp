#include "launch/diagnosis/evidence.h"

#include <algorithm>

#include "base/text.h"

namespace lockstep {

bool has_saved_since(const std::vector<RankView>& ranks, Clock::time_point since) {
  return std::any_of(ranks.begin(), ranks.end(), [&](const RankView& rank) {
    return !rank.account.checkpoint.empty() && rank.account.checkpoint_time >= since;
  });
}

std::string missing_library(const std::deque<std::string>& tail) {
  constexpr std::string_view kWords = "error while loading shared libraries: ";
  for (const std::string& line : tail)
    if (const size_t at = line.find(kWords); at != std::string::npos) {
      const size_t name = at + kWords.size();
      return printable(line.substr(name, line.find(':', name) - name));
    }
  return "";
}

}  // namespace lockstep
