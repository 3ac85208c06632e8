#pragma once

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include <lockstep/error.h>
#include <lockstep/group.h>

#include "base/rank_names.h"
#include "collectives/cause.h"

// Tells one rank's misuse to all where they communicate anyway, so that no rank waits for one that has thrown.

namespace lockstep::fully_sharded {

/// The first of the ranks' troubles, with the ranks that have it; empty if all are.
inline std::string first_trouble(const std::vector<std::string>& troubles) {
  const auto first = std::find_if(troubles.begin(), troubles.end(), [](const auto& one) { return !one.empty(); });
  return first == troubles.end() ? "" : ranks_with(troubles, *first) + ": " + *first;
}

/// Throws the first of the ranks' troubles; returns if all are empty.
inline void refuse_troubles(const std::vector<std::string>& troubles) {
  if (const std::string first = first_trouble(troubles); !first.empty()) throw Error(first);
}

/// Throws on all ranks if `checks` throw on some.
/// REQUIRES: every rank calls it.
inline void on_all_ranks(const Group& group, const std::function<void()>& checks) {
  const std::string mine = failure_of(checks);
  const auto all = group.all_gather_bytes(mine);
  TORCH_CHECK(mine.empty(), mine);
  refuse_troubles(all);
}

/// Tells all ranks this rank's intended action, or the reason why it cannot act, which throws on all ranks. Returns the
/// ranks' actions.
/// REQUIRES: every rank calls it.
inline std::vector<std::string> tell_all(const Group& group, const std::string& trouble, const std::string& intention) {
  constexpr char kIntends = '\n';  // no trouble begins with it
  const auto said = group.all_gather_bytes(trouble.empty() ? kIntends + intention : trouble);
  std::vector<std::string> troubles, intentions;
  for (const std::string& one : said) {
    const bool intends = one.front() == kIntends;
    troubles.push_back(intends ? "" : one);
    intentions.push_back(intends ? one.substr(1) : "");
  }
  refuse_troubles(troubles);
  return intentions;
}

}  // namespace lockstep::fully_sharded
