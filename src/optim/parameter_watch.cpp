#include "optim/parameter_watch.h"

#include <utility>

#include "base/weights_set.h"
#include "optim/common_trouble.h"

namespace lockstep::detail {

std::string ParameterWatch::backward_begins(bool awaits_step) {
  Seen now{.sample = sample_of_parameters(areas_), .versions = 0, .changes = times_weights_were_set()};
  for (const Areas::Parameter& parameter : areas_.parameters())
    now.versions += static_cast<uint64_t>(parameter.tensor._version());
  const std::optional<Seen> before = std::exchange(seen_, now);
  const bool changed =
      before && now.changes == before->changes && (now.sample != before->sample || now.versions != before->versions);
  if (!awaits_step || !changed) return "";
  return "parameters were changed after a backward, but not by step() of the ZeroRedundancyOptimizer that was made "
         "from this model: while it exists, backward leaves each rank's own gradients in .grad, and only its step() "
         "averages them, so ranks that step by another optimizer diverge. Call its step(), or destroy it; to leave out "
         "a step, call skip_step()";
}

}  // namespace lockstep::detail
