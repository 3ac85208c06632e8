#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// "rank 1" or "ranks 0, 2": those for which `chosen` is true.
inline std::string rank_names(const std::vector<bool>& chosen) {
  std::string list;
  int count = 0;
  for (size_t rank = 0; rank < chosen.size(); ++rank)
    if (chosen[rank]) list += (count++ ? ", " : "") + std::to_string(rank);
  return (count == 1 ? "rank " : "ranks ") + list;
}

/// The same: those whose value is `value`.
template <typename Value>
std::string ranks_with(const std::vector<Value>& values, const Value& value) {
  std::vector<bool> chosen;
  for (const Value& other : values) chosen.push_back(other == value);
  return rank_names(chosen);
}

}  // namespace lockstep
