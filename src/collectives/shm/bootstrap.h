#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "collectives/shm/world.h"

namespace lockstep::shm {

/// Gives every rank's text to every rank, in rank order; a key-value store or a socket lies behind. Called the same
/// number of times on every rank. Throws where ranks stay away.
using AllGather = std::function<std::vector<std::string>(const std::string& mine)>;

struct BootstrapOptions {
  /// For passing descriptors once all ranks have announced themselves.
  std::chrono::milliseconds timeout = std::chrono::seconds(30);
  /// Address space for memory handed out; nothing is committed before it is used. 0: as much as the machine has, but
  /// no more than what many groups of many ranks can have each.
  size_t resident_bytes = 0;
  /// The machine's memory. 0: ask the system.
  size_t machine_bytes = 0;
};

/// Forms a group of the ranks of one machine. All ranks call it, with the same `size`; blocks until the group stands
/// on every rank, or throws Error on every rank, naming the one that could not join and why: another machine or
/// container, another user, too little memory, too few descriptors.
///
/// Each rank makes its segment, listens on an abstract Unix socket with a random 128-bit name for as long as this
/// call lasts, and hands the segment to the ranks that connect. Nothing is left in any file system. That ranks share
/// memory is proven by reading, through the mapping, the random number a peer announced. What stays open is one
/// descriptor a group, and for each peer its process's, which all groups share, or else the pair's socket.
World bootstrap(int rank, int size, const AllGather& all_gather, const BootstrapOptions& options = {});

/// Descriptors that bootstrap() takes in this process while it forms a group; fewer stay open.
size_t descriptors_to_form(int rank, int size);

/// The areas' sizes for a group of `world_size`.
Geometry geometry_for(int world_size);

}  // namespace lockstep::shm
