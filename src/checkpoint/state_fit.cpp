#include "checkpoint/state_fit.h"

#include <sstream>

#include <algorithm>
#include <set>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

namespace lockstep {
namespace {

std::string layout_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.layout();
  return text.str();
}

}  // namespace

std::string problem_of_given(const at::Tensor& given) {
  if (!given.defined()) return "an undefined tensor given";
  if (given.is_meta()) return "given on the meta device, which holds no values";
  if (given.is_nested()) return "a nested tensor given, which has no shape; pad it first";
  return "";
}

std::string problem_of_copy(const at::Tensor& given, const at::Tensor& own, const std::string& where) {
  if (const std::string problem = problem_of_given(given); !problem.empty()) return problem;
  if (!own.defined()) return "undefined in " + where;
  if (own.is_meta()) return "on the meta device in " + where + ", which holds no values; move it first, by to_empty()";
  if (given.layout() != own.layout()) return layout_of(given) + " given, " + layout_of(own) + " in " + where;
  if (given.is_quantized() != own.is_quantized())
    return std::string(given.is_quantized() ? "quantized" : "not quantized") + " as given, but " +
           (own.is_quantized() ? "quantized" : "not") + " in " + where + "; dequantize() it first";
  if (own.layout() == at::kStrided && at::has_internal_overlap(own) == at::MemOverlap::Yes)
    return "its elements share memory in " + where + " (expand()), so they cannot be set one by one; clone it first";
  return "";
}

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
