#pragma once

#include <atomic>
#include <cstdint>

namespace lockstep {

namespace detail {
inline std::atomic<uint64_t> parameter_changes{0};
}

/// This library writes parameters otherwise than by a step: a state is loaded, copies are made equal, averages take the
/// weights' place for a while. Who watches parameters for another optimizer's steps takes that for none.
inline void note_parameter_change() { detail::parameter_changes.fetch_add(1, std::memory_order_relaxed); }
/// How often it has.
inline uint64_t parameter_changes() { return detail::parameter_changes.load(std::memory_order_relaxed); }

}  // namespace lockstep
