#pragma once

#include <lockstep/shard.h>

namespace lockstep {

/// A machine of a run of `lockstep run --islands`: a run of its own, which DiLoCo keeps together with the others. In
/// any other run there is one, with number 0.
struct Island {
  int number = 0;
  int count = 1;  ///< machines, those included that may yet join
};
/// This machine's. Throws Error if the launcher's variables cannot be read.
Island island();

/// The part of the data that this rank reads, for a DataLoader: each machine has another part, and its ranks share it.
/// `own` is the Context, which becomes a Shard, and the result in a run without --islands.
Shard island_shard(Shard own);

}  // namespace lockstep
