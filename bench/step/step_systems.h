#pragma once

#include <string>
#include <string_view>

#include "workers/system.h"

namespace lockstep::bench {

/// The first is what the others are compared with: the same programs without communication, with the memory that
/// DistributedDataParallel keeps. side_by_side is that without such memory, side_by_side_fused with
/// ZeroRedundancyOptimizer on each rank alone, side_by_side_python the same program in Python; one_process trains on
/// all ranks' batches with a thread on each core, and keeps memory, too; lockstep_sharded and lockstep_shared share out
/// the optimizer's step, the latter with shared parameters. python_attach is lockstep.attach() with torch's optimizer,
/// and python_attach_zero with lockstep.ZeroRedundancyOptimizer.
inline constexpr std::string_view kStepSystems[] = {
    "side_by_side_kept", "side_by_side",       "side_by_side_fused",   "side_by_side_python", "one_process",
    "lockstep",          "lockstep_sharded",   "lockstep_shared",      "pytorch_ddp_gloo",    "pytorch_zero_gloo",
    "python_attach",     "python_attach_zero", "pytorch_ddp_lockstep", "c10d_reducer_gloo"};
/// Whose ranks do not communicate, so that they drift apart from the first step on.
constexpr bool is_side_by_side(std::string_view system) { return system.starts_with("side_by_side"); }
/// How many processes do the work of `ranks`.
constexpr int processes_of(std::string_view system, int ranks) { return system == "one_process" ? 1 : ranks; }
inline constexpr std::string_view kStepModels[] = {"mlp",        "resnet",      "transformer",
                                                   "small_1000", "small_10000", "linear_100m"};
/// LibTorch's own in C++; in Python with fused=True.
inline constexpr std::string_view kStepOptimizers[] = {"sgd", "adamw"};

/// What a contest trains.
struct StepWork {
  std::string model;
  std::string optimizer;
  int ranks = 2;
};

/// How `system` does `work`. `build` is the build folder, `python` the interpreter for PyTorch's systems.
System make_step_system(const std::string& system, const StepWork& work, const std::string& build,
                        const std::string& python);

}  // namespace lockstep::bench
