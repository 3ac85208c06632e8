#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// Gives every rank's text to every rank, in rank order, through a key-value store or a socket. Called equally often on
/// every rank. Throws if ranks do not arrive.
using AllGather = std::function<std::vector<std::string>(const std::string& mine)>;

struct BootstrapOptions {
  /// How long passing descriptors may take once all ranks have announced themselves.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  /// Address space for allocations; nothing is committed before it is used. 0: as much as the machine's memory, but
  /// leaving room for many groups of many ranks.
  size_t resident_bytes = 0;
  /// The machine's memory. 0: ask the system.
  size_t machine_bytes = 0;
};

/// Forms a group of the ranks of one machine. All ranks call it with the same `size`. Blocks until the group is formed
/// on every rank, or throws Error on every rank, naming the rank that could not join and why: another machine or
/// container, another user, too little memory, too few descriptors.
///
/// Each rank makes its segment, listens on an abstract Unix socket with a random 128-bit name for the duration of this
/// call, and passes the segment to the ranks that connect. Nothing is left in any file system. To prove that the ranks
/// share memory, each reads through the mapping the random number that its peer announced. One descriptor for each
/// group stays open, and for each peer a descriptor of its process, which all groups share, or else the pair's socket.
World bootstrap(int rank, int size, const AllGather& all_gather, const BootstrapOptions& options = {});

/// The number of descriptors that bootstrap() needs in this process while it forms a group; fewer stay open.
size_t descriptors_to_form(int rank, int size);

/// The sizes of the areas for a group of `world_size`.
Geometry geometry_for(int world_size);

}  // namespace lockstep::shm
