#pragma once

#include <string>
#include <string_view>

#include "workers/system.h"

namespace lockstep::bench {

inline constexpr std::string_view kSystems[] = {"shm",     "gloo",           "lockstep-gloo", "mpich",
                                                "openmpi", "openmpi-debian", "impi"};

/// `build` is the build folder; `cores` are those this process may use. Throws std::invalid_argument on another name.
System make_system(std::string_view name, const std::string& build, int ranks, int cores);

}  // namespace lockstep::bench
