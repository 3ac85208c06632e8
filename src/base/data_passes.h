#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// A pass of a loader over its shard. Loaders do not communicate; the code that reduces the results of their batches
/// compares the passes.
struct DataPass {
  std::vector<std::string> facts;  ///< that determine the epoch, such as "seed 3"; equal on ranks that share it
  int rank, world_size;            ///< of the shard
};

/// Records a pass that begins in this process. Passes over a shard of a world of one concern no other rank, and are not
/// recorded.
void note_pass(DataPass pass);

struct NewPasses {
  std::vector<DataPass> list;
  bool cut = false;  ///< there were more; these are the newest
};
/// The number of passes so far.
uint64_t passes_noted();
/// The passes after the first `seen`. Sets `seen` to passes_noted().
NewPasses passes_since(uint64_t& seen);
/// A hash of the passes' facts, without their shards; 0 if none.
uint64_t hash_of(const NewPasses& passes);

}  // namespace lockstep
