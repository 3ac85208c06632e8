#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace lockstep {

/// The ranks whose calls, not yet made, a waiting rank needs.
struct Needs {
  std::vector<int> ranks;      ///< empty: the rank does not wait, or its call has been made
  bool any_is_enough = false;  ///< false: it needs all of them
};

/// The ranks that can never proceed because they need calls from one another. needs[r] is rank r's.
inline std::vector<bool> stuck_ranks(const std::vector<Needs>& needs) {
  std::vector<bool> stuck;
  for (const Needs& of : needs) stuck.push_back(!of.ranks.empty());
  const auto is_stuck = [&](int rank) { return stuck[static_cast<size_t>(rank)]; };
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t rank = 0; rank < needs.size(); ++rank) {
      const auto& [of, any_is_enough] = needs[rank];
      if (!stuck[rank] ||
          (any_is_enough ? std::all_of(of.begin(), of.end(), is_stuck) : std::any_of(of.begin(), of.end(), is_stuck)))
        continue;
      stuck[rank] = false;
      changed = true;
    }
  }
  return stuck;
}

/// Follows the sentences about what each rank waits for.
inline constexpr const char* kStuckHint =
    ". None of them can go on. Every send needs a recv with the same tag, and while one rank of a pair sends the other "
    "must "
    "receive; send_async() and recv_async() do not wait.";

}  // namespace lockstep
