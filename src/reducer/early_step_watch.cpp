#include "reducer/early_step_watch.h"

#include "base/weights_set.h"
#include "collectives/sample.h"

namespace lockstep {

void EarlyStepWatch::remember(const std::vector<at::Tensor>& parameters, const std::vector<bool>& reached) {
  // An optimizer's step changes nearly all of its parameters.
  constexpr size_t kMost = 32;
  seen_.clear();
  weights_set_ = times_weights_were_set();
  std::vector<size_t> stepped;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (reached[i] && parameters[i].is_cpu() && parameters[i].grad().defined()) stepped.push_back(i);
  const size_t apart = (stepped.size() + kMost - 1) / kMost;
  for (size_t at = 0; at < stepped.size(); at += apart)
    seen_.emplace_back(stepped[at], sample_of(parameters[stepped[at]]));
}

std::optional<size_t> EarlyStepWatch::found(const std::vector<at::Tensor>& parameters) const {
  if (weights_set_ != times_weights_were_set()) return std::nullopt;
  for (const auto& [parameter, sample] : seen_)
    if (sample_of(parameters[parameter]) != sample) return parameter;
  return std::nullopt;
}

}  // namespace lockstep
