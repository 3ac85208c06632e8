#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// "0, 2-5": numbers in ascending order, with three or more in a row as a range.
std::string list_ranks(const std::vector<int>& ascending);

/// "rank 1" or "ranks 0, 2-5".
std::string rank_names(const std::vector<int>& ascending);
std::string rank_names(const std::vector<bool>& chosen);
std::string rank_names(uint64_t bits);

template <typename Value>
std::string ranks_with(const std::vector<Value>& values, const Value& value) {
  std::vector<bool> chosen;
  for (const Value& other : values) chosen.push_back(other == value);
  return rank_names(chosen);
}

/// "ranks 0, 2 `verb`A, rank 1 `verb`B": the ranks that have each value, values in the order of their first rank.
std::string ranks_of_each(const std::vector<std::string>& values, const std::string& verb);

}  // namespace lockstep
