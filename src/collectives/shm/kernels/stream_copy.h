#pragma once

#include <cstddef>

namespace lockstep::shm {

/// Whether so many bytes, all that an operation reads and writes on all ranks, have left the caches before anybody
/// reads a result: they fill the last-level cache. (From half of it on, all_gather, all_to_all and scatter took 1.3 to
/// 1.6 times as long as by plain copies on 2 cores with 32 MiB.)
bool leave_caches(size_t bytes);

/// A memcpy that bypasses the caches if the processor can: destination lines are not fetched first, and nothing is
/// evicted. (memcpy does so for large copies, but sees only one round's piece.)
void stream_copy(std::byte* to, const std::byte* from, size_t bytes);

/// stream_copy() from a source in memory rather than in the caches. It is fetched ahead, and the caches are left as
/// they are.
void stream_copy_from_memory(std::byte* to, const std::byte* from, size_t bytes);

using CopyFunction = void (*)(std::byte* to, const std::byte* from, size_t bytes);
/// A std::memcpy, unless there is nothing to copy.
void plain_copy(std::byte* to, const std::byte* from, size_t bytes);
/// How results are copied to where the caller has them: by stream_copy() if they leave the caches, else by
/// plain_copy().
CopyFunction result_copy(size_t touched_bytes);

}  // namespace lockstep::shm
