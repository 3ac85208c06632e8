#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace lockstep {

/// The facts of `lockstep doctor` about the machine, without starting a rank: system, processor, cores, quota, NUMA
/// nodes, memory, limits, and the versions of other launchers in PATH. Takes as long as those need to print their
/// versions, a few seconds at most.
nlohmann::json machine_facts();

/// The number of NVIDIA GPUs with devices in `folder` (/dev/nvidia0, ...), at most as many as `visible`, the value of
/// CUDA_VISIBLE_DEVICES, names; "-" if that is not set.
int count_gpus(const std::string& visible, const std::string& folder = "/dev");

}  // namespace lockstep
