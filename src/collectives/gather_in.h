#pragma once

#include <string>
#include <vector>

#include <lockstep/error.h>
#include <lockstep/group.h>

namespace lockstep {

/// all_gather_bytes() of what ranks compare in `function`. Throws Error where a rank is in another one that gathers
/// bytes, too; `duty` is what all ranks must do.
inline std::vector<std::string> gather_in(const Group& group, const std::string& function, const std::string& lines,
                                          const std::string& duty) {
  const std::string heading = function + '\n';
  std::vector<std::string> all = group.all_gather_bytes(heading + lines);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].starts_with(heading))
      throw Error(function + ": rank " + std::to_string(rank) + " calls another function instead; all ranks must " +
                  duty);
    all[rank].erase(0, heading.size());
  }
  return all;
}

}  // namespace lockstep
