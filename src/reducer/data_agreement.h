#pragma once

#include <vector>

#include <lockstep/group.h>

#include "base/data_passes.h"
#include "reducer/facts.h"

namespace lockstep {

/// Whether a pass reads the shard of another rank of the group.
bool reads_of_another(const NewPasses& passes, const Group& group);

/// Whether loaders have begun different passes on ranks that have begun any, or read others' shards. compare_passes()
/// then finds out whether something is wrong.
bool differ_in_data(const std::vector<Facts>& rows);

/// Throws the same Error on all ranks if their loaders would deal out different epochs, or two of them the same part of
/// one. A loader that only some ranks use is not an error. `within_join`: batch sizes may differ.
/// REQUIRES: all ranks call it.
void compare_passes(const Group& group, const NewPasses& mine, bool within_join);

}  // namespace lockstep
