#include "base/rank_names.h"

#include <algorithm>

namespace lockstep {

std::string list_ranks(const std::vector<int>& ascending) {
  std::string text;
  for (size_t i = 0; i < ascending.size();) {
    size_t last = i;
    while (last + 1 < ascending.size() && ascending[last + 1] == ascending[last] + 1) ++last;
    text += (text.empty() ? "" : ", ") + std::to_string(ascending[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ascending[last]);
    i = last + 1;
  }
  return text;
}

std::string rank_names(const std::vector<int>& ascending) {
  return (ascending.size() == 1 ? "rank " : "ranks ") + list_ranks(ascending);
}

std::string rank_names(const std::vector<bool>& chosen) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < chosen.size(); ++rank)
    if (chosen[rank]) ranks.push_back(static_cast<int>(rank));
  return rank_names(ranks);
}

std::string rank_names(uint64_t bits) {
  std::vector<int> ranks;
  for (int rank = 0; bits != 0; ++rank, bits >>= 1)
    if ((bits & 1) != 0) ranks.push_back(rank);
  return rank_names(ranks);
}

std::string ranks_of_each(const std::vector<std::string>& values, const std::string& verb) {
  std::string text;
  for (auto value = values.begin(); value != values.end(); ++value)
    if (std::find(values.begin(), value, *value) == value)
      text += (text.empty() ? "" : ", ") + ranks_with(values, *value) + ' ' + verb + *value;
  return text;
}

}  // namespace lockstep
