#pragma once

#include <string>

#include <lockstep/error.h>
#include <lockstep/group.h>

#include "base/text.h"
#include "collectives/group_state.h"

namespace lockstep {

/// Throws Error: a state lies in slices on the ranks of `holders`, which is not the Checkpointer's `group`.
[[noreturn]] inline void refuse_other_group(const Group& holders, const Group& group) {
  throw Error("a state lies in slices on " + counted(holders.world_size(), "rank", "ranks") +
              ", those of the model's group, but the Checkpointer was made with another group, of " +
              counted(group.world_size(), "rank", "ranks") + "; make it with the group that the model was made with");
}

/// Whether `holders` is `group`. Throws Error if it is another group and no rank may hold the whole state.
inline bool are_ranks_of(const Group& group, const Group& holders, bool is_never_whole) {
  if (&state_of(holders) == &state_of(group)) return true;
  if (is_never_whole) refuse_other_group(holders, group);
  return false;
}

}  // namespace lockstep
