#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace lockstep {

/// A name that occurs twice in `all`, or null. Takes 16 bytes per name: a set would take more memory than the names.
template <typename T>
const std::string* name_given_twice(const std::vector<T>& all) {
  std::vector<std::pair<size_t, uint32_t>> hashes;
  hashes.reserve(all.size());
  for (const T& one : all)
    hashes.emplace_back(std::hash<std::string>()(one.name), static_cast<uint32_t>(hashes.size()));
  const auto name = [&](const auto& hash) -> const std::string& { return all[hash.second].name; };
  std::sort(hashes.begin(), hashes.end(),
            [&](const auto& a, const auto& b) { return a.first != b.first ? a.first < b.first : name(a) < name(b); });
  const auto twice = std::adjacent_find(hashes.begin(), hashes.end(), [&](const auto& a, const auto& b) {
    return a.first == b.first && name(a) == name(b);
  });
  return twice == hashes.end() ? nullptr : &name(*twice);
}

}  // namespace lockstep
