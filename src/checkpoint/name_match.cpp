#include "checkpoint/name_match.h"

#include <algorithm>
#include <set>

namespace lockstep {
namespace {

constexpr const char* kPrefixes[] = {"module.", "_orig_mod."};
constexpr size_t kMaxLetters = 200;  // of a name compared letter by letter

/// The number of letters to insert, remove or replace (Levenshtein), at most `limit`.
size_t differing_letters(const std::string& a, const std::string& b, size_t limit) {
  if (a.size() > b.size() + limit || b.size() > a.size() + limit) return limit;
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0], least = row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
      least = std::min(least, row[j]);
    }
    if (least >= limit) return limit;
  }
  return std::min(row.back(), limit);
}

}  // namespace

std::string without(const std::string& prefix, const std::string& name) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

std::string prefix_to_remove(const std::vector<std::string>& own, const std::vector<std::string>& given) {
  const std::set<std::string> wanted(own.begin(), own.end());
  const auto matching = [&](const std::string& prefix) {
    std::set<std::string> found;
    for (const std::string& name : given) {
      const std::string key = without(prefix, name);
      if (wanted.contains(key) && !found.insert(key).second) return size_t{0};  // two would become one
    }
    return found.size();
  };
  std::string best, candidate;
  size_t most = matching("");
  // Wrappers are nested, so the prefixes of a first name are tried one after the other.
  const auto first = std::find_if(given.begin(), given.end(), [](const std::string& name) {
    return std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                       [&](const char* prefix) { return name.starts_with(prefix); });
  });
  if (first == given.end()) return best;
  for (bool more = true; more;) {
    more = false;
    for (const char* prefix : kPrefixes) {
      if (first->compare(candidate.size(), std::string(prefix).size(), prefix) != 0) continue;
      candidate += prefix;
      more = true;
      if (const size_t now = matching(candidate); now > most) {
        most = now;
        best = candidate;
      }
      break;
    }
  }
  return best;
}

std::string nearest_name(const std::string& name, const std::vector<std::string>& candidates) {
  std::string nearest;
  size_t fewest = std::max<size_t>(name.size() / 3, 1) + 1;
  for (const std::string& candidate : candidates) {
    if (candidate.ends_with("." + name) || name.ends_with("." + candidate)) return candidate;
    if (candidate.size() > kMaxLetters || name.size() > kMaxLetters) continue;
    const size_t letters = differing_letters(name, candidate, fewest);
    if (letters >= fewest) continue;
    fewest = letters;
    nearest = candidate;
  }
  return nearest;
}

}  // namespace lockstep
