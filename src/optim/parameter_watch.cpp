#include "optim/parameter_watch.h"

#include <utility>

#include "base/weights_set.h"
#include "optim/common_trouble.h"

namespace lockstep::detail {
namespace {

constexpr const char* kSharedChanged =
    "parameters were changed, but not by step() of the ZeroRedundancyOptimizer that was made from this model with "
    "shared_parameters = true: all ranks share one copy of them, so what each rank changes, as another optimizer does, "
    "is changed once for every rank. Let only its step() change them, or destroy it; make any other change on one rank "
    "and then call broadcast_parameters(), with that rank, on every rank";

}  // namespace

ParameterWatch::Seen ParameterWatch::look() const {
  uint64_t versions = 0;
  for (const Areas::Parameter& parameter : areas_.parameters())
    versions += static_cast<uint64_t>(parameter.tensor._version());
  return {.sample = shared_ ? sample_of_own_slices(areas_) : sample_of_parameters(areas_),
          .versions = versions,
          .changes = times_weights_were_set()};
}

std::string ParameterWatch::trouble() const {
  return shared_ && seen_ && changed(*seen_, look()) ? kSharedChanged : "";
}

void ParameterWatch::backward_begins(bool awaits_step) {
  const Seen now = look();
  const std::optional<Seen> before = std::exchange(seen_, now);
  if (!(shared_ || awaits_step) || !before || !changed(*before, now)) return;
  TORCH_CHECK(!shared_, kSharedChanged);
  TORCH_CHECK(false,
              "parameters were changed after a backward, but not by step() of the ZeroRedundancyOptimizer that was made "
              "from this model: while it is there, backward leaves each rank's own gradients in .grad, and only its "
              "step() takes their mean, so ranks that step by another optimizer train apart. Call its step(), or "
              "destroy it; to leave out a step, call skip_step()");
}

}  // namespace lockstep::detail
