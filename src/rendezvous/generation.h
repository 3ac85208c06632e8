#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "rendezvous/meeting_store.h"

namespace lockstep {

/// The agreement of the ranks that meet in a store.
struct Generation {
  std::string prefix;        ///< of the keys that these ranks use, and no earlier ranks have used
  std::vector<int> missing;  ///< not empty: these ranks have not joined before the timeout, and there is no prefix
};

/// Lets live ranks find each other in a store that may hold the keys of earlier ones: torchrun's agent keeps its store
/// when it restarts its ranks, and a process can form the same group twice. No rank returns a prefix before all have
/// called. The prefix is equal on all ranks, and has never been returned before in this store. Throws the store's
/// exceptions, for example when its server is gone, and Error if a rank has another `world_size` than rank 0.
/// REQUIRES: every rank calls it.
Generation agree_on_generation(MeetingStore& store, int rank, int world_size, std::chrono::milliseconds timeout);

}  // namespace lockstep
