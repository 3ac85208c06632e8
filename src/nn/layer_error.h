#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/error.h>

#include "base/rank_names.h"

namespace lockstep {

/// The error for ranks that do not run the same synchronised layers. `layer`: "batch norm `bn1`"; `where`: each rank's
/// place.
inline Error layer_error(const std::string& layer, const std::string& where) {
  return Error(layer +
               " is synchronised over all ranks, so every rank must run it: call forward on every rank (an empty batch "
               "will do), put the layer into eval(), or do not convert it. " +
               where);
}

/// "rank 0 in the forward of ..., rank 1 in ...", of the known places by rank.
inline std::string said_by_rank(const std::vector<std::optional<std::string>>& places) {
  std::string said;
  for (auto one = places.begin(); one != places.end(); ++one)
    if (*one && std::find(places.begin(), one, *one) == one)
      said += (said.empty() ? "" : ", ") + ranks_with(places, *one) + " in " + **one;
  return said;
}

}  // namespace lockstep
