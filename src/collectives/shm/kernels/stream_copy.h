#pragma once

#include <cstddef>

namespace lockstep::shm {

/// A memcpy that bypasses the caches if the processor can: destination lines are not fetched first, and nothing is
/// evicted. (memcpy does so for large copies, but sees only one round's piece.)
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

/// stream_copy() from a source in memory rather than in the caches. It is fetched ahead, and the caches are left as
/// they are.
void stream_copy_from_memory(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace lockstep::shm
