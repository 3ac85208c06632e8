#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "optim/areas.h"

namespace lockstep::detail {

/// Notices that something else than an optimizer's step has changed its parameters: between two backward passes, and
/// where all ranks share one copy, also between a step and the next backward or step.
///
/// LibTorch's own optimizers write through .data(), which counts no version, so values are compared, by a sample. Before
/// a step ends, each rank notes a sample of the slices of a shared copy that it has stepped, where all ranks read it:
/// afterwards nobody can tell what the step has written from what came later.
class ParameterWatch {
 public:
  /// `shared`: parameters lie once for all ranks, so ranks that step them by themselves step them several times. Every
  /// rank makes it.
  ParameterWatch(const Areas& areas, bool shared);

  /// TORCH_CHECK fails if parameters have changed since the last backward, without a step; shared ones: since the last
  /// step or backward. `awaits_step`: only the step takes the mean of that one's gradients.
  void backward_begins(bool awaits_step);
  /// Why this rank must not step: shared parameters have changed since the last step or backward. Empty: nothing.
  std::string trouble() const;
  void step_begins();
  /// This rank has written its slices, and no rank has left the step yet.
  void slices_written();
  /// All ranks have written theirs.
  void step_ended();

 private:
  /// Of the parameters: a sample of their values; how often they were written; how often by this library.
  struct Seen {
    uint64_t sample, versions, changes;
  };
  Seen look() const;
  /// TORCH_CHECK fails if the shared copy has changed.
  void check_shared_copy(const Seen& now) const;
  /// Of the samples of all slices, in the order of ranks.
  Seen seen_of(const std::vector<uint64_t>& samples) const;
  bool changed(const Seen& before, const Seen& now) const {
    return now.changes == before.changes && (now.sample != before.sample || now.versions != before.versions);
  }

  const Areas& areas_;
  const bool shared_;
  const at::Tensor samples_;  ///< shared: int64 [ranks], memory of all, where each rank notes its slices' sample
  std::optional<Seen> seen_;  ///< when the last backward began, if there was no step since; shared: or a step ended
};

}  // namespace lockstep::detail
