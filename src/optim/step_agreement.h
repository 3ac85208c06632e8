#pragma once

#include <cstdint>
#include <string>

#include <lockstep/group.h>

namespace lockstep::detail {

/// The next action of a rank that takes part in a step. kFollow: do as the others do.
enum class StepAction : int64_t { kFollow, kClip, kStep };
struct StepRequest {
  StepAction action;
  double max_norm = 0, norm_type = 0;  ///< to clip
};

/// A rank's statement to the others, made before any of them touches shared memory.
struct StepStatement {
  StepRequest request;
  std::string trouble;                     ///< the reason why this rank cannot step; empty if none
  uint64_t step = 0;                       ///< a hash of the parameters, rates and states of the step
  uint64_t gradients = 0, parameters = 0;  ///< samples of their values
  uint64_t loaded = 0;                     ///< SharedCopyWatch::loaded()
};

/// Returns the action that all ranks take. Throws on all of them if one is in trouble or is about to act differently.
/// REQUIRES: every rank calls it.
StepRequest agree_on_step(const Group& group, const StepStatement& mine);

}  // namespace lockstep::detail
