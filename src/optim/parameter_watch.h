#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "optim/areas.h"

namespace lockstep::detail {

/// Notices that something other than an optimizer's step has changed parameters of which each rank holds a copy,
/// between two backward passes. LibTorch's own optimizers write through .data(), which counts no version, so a sample
/// of the values is compared.
class ParameterWatch {
 public:
  explicit ParameterWatch(const Areas& areas) : areas_(areas) {}

  /// Describes the error if parameters have changed since the last backward without a step; empty if they have not.
  /// `awaits_step`: only the step takes the mean of that backward's gradients.
  std::string backward_begins(bool awaits_step);
  void step_begins() { seen_.reset(); }

 private:
  /// A sample of the parameters' values, how often they were written, and how often by this library.
  struct Seen {
    uint64_t sample, versions, changes;
  };

  const Areas& areas_;
  std::optional<Seen> seen_;  ///< when the last backward began, if there was no step since
};

}  // namespace lockstep::detail
