#pragma once

#include <string>

#include "checkpoint/format/pickle_tree.h"

namespace lockstep {

/// Limits of a pickle's bytes and of the nodes made from it: some 300,000 tensors.
constexpr uint64_t kMaxPickleBytes = 64 << 20;
constexpr size_t kMaxPickleNodes = 8 << 20;

/// Reads the output of torch.save, in Python's pickle protocols 2 to 5. Only listed opcodes and globals are allowed:
/// tensors, storages, dtypes, containers, numbers, strings, and NumPy's scalars. Everything else is refused by name,
/// and nothing is ever called. Fills `tree` from its pickle. Throws Error with the byte's position, without a file
/// name.
void read_pickle(PickleTree& tree);

}  // namespace lockstep
