#include "optim/parameter_watch.h"

#include <utility>

#include "base/weights_set.h"
#include "optim/common_trouble.h"

namespace lockstep::detail {

ParameterWatch::Seen ParameterWatch::look() const {
  uint64_t versions = 0;
  for (const Areas::Parameter& parameter : areas_.parameters())
    versions += static_cast<uint64_t>(parameter.tensor._version());
  return {.sample = sample_of_parameters(areas_), .versions = versions, .changes = times_weights_were_set()};
}

void ParameterWatch::backward_begins(bool awaits_step) {
  const Seen now = look();
  const std::optional<Seen> before = std::exchange(seen_, now);
  const bool may_differ = !before || now.changes != before->changes || !(awaits_step || shared_);
  if (may_differ || (now.sample == before->sample && now.versions == before->versions)) return;
  constexpr const char* kChanged =
      "parameters were changed after a backward, but not by step() of the ZeroRedundancyOptimizer that was made from "
      "this model: while it is there, ";
  TORCH_CHECK(!awaits_step, kChanged,
              "backward leaves each rank's own gradients in .grad, and only its step() takes their mean, so ranks that "
              "step by another optimizer train apart. Call its step(), or destroy it; to leave out a step, call "
              "skip_step()");
  TORCH_CHECK(false, kChanged,
              "all ranks share one copy of the parameters (shared_parameters), so where each rank steps them by "
              "another optimizer, they are stepped once for every rank. Call its step(), or destroy it");
}

}  // namespace lockstep::detail
