#pragma once

#include <nlohmann/json.hpp>

namespace lockstep {

/// What `lockstep doctor` tells of the machine, without starting a rank: system, processor, cores, quota, NUMA nodes,
/// memory, limits, and the versions of the launchers of others that PATH leads to. Takes as long as those need to say
/// their versions, at most some seconds.
nlohmann::json machine_facts();

}  // namespace lockstep
