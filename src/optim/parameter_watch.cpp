#include "optim/parameter_watch.h"

#include <utility>

#include "base/hash.h"
#include "base/weights_set.h"
#include "optim/common_trouble.h"

namespace lockstep::detail {

ParameterWatch::ParameterWatch(const Areas& areas, bool shared)
    : areas_(areas),
      shared_(shared),
      samples_(shared ? areas.memory()->allocate_together(areas.ranks(), at::kLong) : at::Tensor()) {}

ParameterWatch::Seen ParameterWatch::look() const {
  if (shared_) {
    std::vector<uint64_t> samples;
    for (int rank = 0; rank < areas_.ranks(); ++rank) samples.push_back(sample_of_slices(areas_, rank));
    return seen_of(samples);
  }
  return seen_of({sample_of_parameters(areas_)});
}

ParameterWatch::Seen ParameterWatch::seen_of(const std::vector<uint64_t>& samples) const {
  uint64_t sample = Hash::kStart, versions = 0;
  for (const uint64_t one : samples) sample = Hash::mixed(sample, one);
  for (const Areas::Parameter& parameter : areas_.parameters())
    versions += static_cast<uint64_t>(parameter.tensor._version());
  return {.sample = sample, .versions = versions, .changes = times_weights_were_set()};
}

void ParameterWatch::step_begins() {
  if (!shared_) seen_.reset();
}

void ParameterWatch::slices_written() {
  if (shared_)
    samples_.mutable_data_ptr<int64_t>()[areas_.rank()] = static_cast<int64_t>(sample_of_slices(areas_, areas_.rank()));
}

void ParameterWatch::step_ended() {
  if (!shared_) return;
  const auto* noted = samples_.const_data_ptr<int64_t>();
  seen_ = seen_of(std::vector<uint64_t>(noted, noted + areas_.ranks()));
}

void ParameterWatch::check_shared_copy(const Seen& now) const {
  TORCH_CHECK(!seen_ || !changed(*seen_, now),
              "parameters were changed, but not by step() of the ZeroRedundancyOptimizer that was made from this model "
              "with shared_parameters = true: all ranks share one copy of them, so what each rank changes, as another "
              "optimizer does, is changed once for every rank. Let only its step() change them, or destroy it; make any "
              "other change on one rank and then call broadcast_parameters(), with that rank, on every rank");
}

std::string ParameterWatch::trouble() const {
  if (!shared_) return "";
  try {
    check_shared_copy(look());
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

void ParameterWatch::backward_begins(bool awaits_step) {
  const Seen now = look();
  if (shared_) check_shared_copy(now);
  const std::optional<Seen> before = std::exchange(seen_, now);
  TORCH_CHECK(shared_ || !awaits_step || !before || !changed(*before, now),
              "parameters were changed after a backward, but not by step() of the ZeroRedundancyOptimizer that was made "
              "from this model: while it is there, backward leaves each rank's own gradients in .grad, and only its "
              "step() takes their mean, so ranks that step by another optimizer train apart. Call its step(), or "
              "destroy it; to leave out a step, call skip_step()");
}

}  // namespace lockstep::detail
