#pragma once

#include <cstddef>

namespace lockstep::shm {

/// memcpy that writes past the caches, where the processor can: what is written is not fetched first, and pushes
/// nothing out. (memcpy does so by itself for large copies, but knows only the piece of one round.)
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

}  // namespace lockstep::shm
