#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "base/shared_weights.h"
#include "optim/areas.h"

namespace lockstep::detail {

/// Notices that something else than an optimizer's step has changed parameters of which all ranks of a machine hold one
/// copy.
///
/// LibTorch's own optimizers write through .data(), which counts no version, so values are compared, by a sample.
/// Before a step ends, each rank notes a sample of the slices that it has stepped, where all ranks read it: afterwards
/// nobody can tell the step's writes from later ones. A write that counts a version counts it on the rank that makes
/// it, which tells a change by one rank from a change by every rank.
class SharedCopyWatch final : public SharedWeights {
 public:
  /// Every rank makes it.
  SharedCopyWatch(const Group& group, const Areas& areas);

  std::string trouble() const override;
  void were_set() override;
  void before_broadcast(int root) override;

  /// Whether this library has set them on this rank since the last step: all ranks load, or none.
  bool was_set() const { return set_; }
  /// This rank has written its slices, and no rank has left the step yet.
  void slices_written();
  /// All ranks have written theirs.
  void step_ended();

 private:
  /// Of the parameters: a sample of their values; how often this rank has written them.
  struct Seen {
    uint64_t sample, versions;
  };
  Seen look() const;
  /// Of the samples of all slices, in the order of ranks.
  Seen seen_of(const std::vector<uint64_t>& samples) const;

  const Group group_;
  const Areas& areas_;
  const at::Tensor samples_;  ///< int64 [ranks], memory of all, where each rank notes its slices' sample
  Seen seen_{};               ///< when a step ended, or this library set them
  bool set_ = false;          ///< the latter, since the last step or broadcast
  const Entry entry_;
};

}  // namespace lockstep::detail
