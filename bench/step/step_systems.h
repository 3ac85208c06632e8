#pragma once

#include <string>
#include <string_view>

#include "workers/system.h"

namespace lockstep::bench {

/// The first is what the others are compared with: the same programs without communication.
inline constexpr std::string_view kStepSystems[] = {"side_by_side", "lockstep", "pytorch_ddp_gloo",
                                                    "pytorch_ddp_lockstep", "c10d_reducer_gloo"};
inline constexpr std::string_view kStepModels[] = {"mlp", "resnet", "transformer", "small_1000", "linear_100m"};

/// How `system` trains `model`. `build` is the build folder, `python` the interpreter for PyTorch's systems.
System make_step_system(const std::string& system, const std::string& model, int ranks, const std::string& build,
                        const std::string& python);

}  // namespace lockstep::bench
