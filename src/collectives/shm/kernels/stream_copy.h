#pragma once

#include <cstddef>

namespace lockstep::shm {

/// A memcpy that bypasses the caches where the processor can: destination lines are not fetched first, and nothing is
/// evicted. (memcpy does so by itself for large copies, but sees only the piece of one round.)
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

/// The same for a source that lies in memory, not in the caches, which it leaves as they are: it is fetched ahead.
void stream_copy_from_memory(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace lockstep::shm
