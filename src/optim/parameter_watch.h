#pragma once

#include <cstdint>
#include <optional>

#include "optim/areas.h"

namespace lockstep::detail {

/// Notices that something else than an optimizer's step has changed its parameters after a backward.
class ParameterWatch {
 public:
  /// `shared`: parameters lie once for all ranks, so ranks that step them by themselves step them several times.
  ParameterWatch(const Areas& areas, bool shared) : areas_(areas), shared_(shared) {}

  /// TORCH_CHECK fails if parameters have changed since the last backward, without a step. `awaits_step`: only the step
  /// takes the mean of that one's gradients.
  void backward_begins(bool awaits_step);
  void stepped() { seen_.reset(); }

 private:
  /// Of the parameters: a sample of their values; how often they were written; how often by this library.
  struct Seen {
    uint64_t sample, versions, changes;
  };
  Seen look() const;

  const Areas& areas_;
  const bool shared_;
  std::optional<Seen> seen_;  ///< as the last backward began, if there was no step since
};

}  // namespace lockstep::detail
