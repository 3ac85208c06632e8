#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// A pass of a loader over its shard. Loaders do not communicate: whoever reduces what comes of their batches compares.
struct DataPass {
  std::vector<std::string> facts;  ///< on which the epoch depends, such as "seed 3": the same on ranks that share it out
  int rank, world_size;            ///< of the shard
};

/// Notes a pass that begins in this process. A shard of a world of one is nobody else's affair, and is not noted.
void note_pass(DataPass pass);

struct NewPasses {
  std::vector<DataPass> list;
  bool cut = false;  ///< there were more, and these are the newest
};
/// The number of passes so far.
uint64_t passes_noted();
/// The passes after the first `seen`, which becomes passes_noted().
NewPasses passes_since(uint64_t& seen);
/// Of their facts, not of their shards; 0 if there are none.
uint64_t hash_of(const NewPasses& passes);

}  // namespace lockstep
