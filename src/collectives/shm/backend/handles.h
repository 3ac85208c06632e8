#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "collectives/shm/segment/world.h"

namespace lockstep::shm_engine {

/// A text by which other processes of this machine find this one. Handles sort by `rank`.
std::string new_handle(int rank);

/// Forms a group of the processes with these handles, ranks by position. Each of them calls it with the same list and
/// `uuid`; `mine` is the caller's handle. No store is needed: they meet at the first of them. Throws Error on every
/// rank that has come if ranks do not come in time or were given other handles, naming them; if handles are of several
/// machines; or if bootstrap() fails.
shm::World form_by_handles(const std::string& mine, const std::vector<std::string>& handles, int64_t uuid,
                           std::chrono::milliseconds timeout);

}  // namespace lockstep::shm_engine
