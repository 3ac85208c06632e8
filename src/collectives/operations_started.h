#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep {

/// How many collectives and messages this process has begun, over all groups.
inline std::atomic<uint64_t> operations_started{0};

}  // namespace lockstep
