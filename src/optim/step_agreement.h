#pragma once

#include <cstdint>
#include <string>

#include <lockstep/group.h>

namespace lockstep::detail {

/// What a rank that takes part in a step does next; kFollow: what the others do.
enum class StepAction : int64_t { kFollow, kClip, kStep };
struct StepRequest {
  StepAction action;
  double max_norm = 0, norm_type = 0;  ///< to clip
};

/// What a rank tells the others before any of them touches memory of all.
struct StepStatement {
  StepRequest request;
  std::string trouble;                          ///< what keeps this rank from stepping; empty if nothing does
  uint64_t step = 0;                            ///< of what would be stepped, at which rates and from which state
  uint64_t gradients = 0, parameters = 0;       ///< samples of their values
};

/// What all ranks do. Throws on all of them if one is in trouble or about to do something else than the others. Every
/// rank calls it.
StepRequest agree_on_step(const Group& group, const StepStatement& mine);

}  // namespace lockstep::detail
