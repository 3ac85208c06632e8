#include "nearest_name.h"

#include <algorithm>

namespace lockstep {
namespace {

constexpr size_t kLongestName = 64;  // of a name worth a guess

size_t distance(const std::string& a, const std::string& b) {
  const size_t width = b.size() + 1;
  std::vector<size_t> table((a.size() + 1) * width);
  const auto at = [&](size_t i, size_t j) -> size_t& { return table[i * width + j]; };
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        at(i, j) = i + j;
        continue;
      }
      at(i, j) = std::min({at(i - 1, j) + 1, at(i, j - 1) + 1, at(i - 1, j - 1) + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        at(i, j) = std::min(at(i, j), at(i - 2, j - 2) + 1);
    }
  return table.back();
}

}  // namespace

std::string did_you_mean(const std::string& name, const std::vector<std::string>& known) {
  if (name.size() > kLongestName) return "";
  const std::string* nearest = nullptr;
  size_t least = std::max<size_t>(1, std::count_if(name.begin(), name.end(), [](char c) { return c != '-'; }) / 3) + 1;
  for (const std::string& one : known)
    if (const size_t far = distance(name, one); far < least) {
      least = far;
      nearest = &one;
    }
  return nearest == nullptr ? "" : "; did you mean " + *nearest + "?";
}

}  // namespace lockstep
