#pragma once

#include <string>

#include "checkpoint/format/pickle_tree.h"

namespace lockstep {

/// At most this much of a pickle is read, and at most this many nodes are made of it: some 300,000 tensors.
constexpr uint64_t kMaxPickleBytes = 64 << 20;
constexpr size_t kMaxPickleNodes = 8 << 20;

/// Reads what torch.save writes, in Python's pickle protocols 2 to 5. Opcodes and globals are those of a list: tensors,
/// storages, dtypes, containers, numbers, strings, and NumPy's scalars. Anything else is refused by name, and nothing
/// is ever called. Fills `tree` from its pickle. Throws Error, without a file's name, saying at which byte.
void read_pickle(PickleTree& tree);

}  // namespace lockstep
