#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "base/shared_weights.h"
#include "optim/areas.h"

namespace lockstep::detail {

/// Notices that something other than an optimizer's step has changed parameters of which all ranks of a machine hold
/// one copy.
///
/// LibTorch's own optimizers write through .data(), which counts no version, so a sample of the values is compared.
/// Before a step ends, each rank publishes a sample of its stepped slices to all ranks, because afterwards the step's
/// writes cannot be told from later ones. A write that counts a version counts it on the writing rank, which
/// distinguishes a change by one rank from a change by every rank.
class SharedCopyWatch final : public SharedWeights {
 public:
  /// REQUIRES: every rank makes it.
  SharedCopyWatch(const Group& group, const Areas& areas);

  std::string trouble() const override;
  void were_set(const std::vector<const void*>& storages, uint64_t values) override;
  void before_broadcast(int root) override;

  /// The trouble when the optimizer ends, and each rank gets its own copy.
  std::string trouble_at_end() const;

  /// A hash of the values to which this library has set them on this rank since the last step or broadcast: all ranks
  /// load the same, or none does. 0: it has set nothing.
  uint64_t loaded() const { return loaded_by(areas_.rank()); }
  /// Called when this rank has written its slices, and no rank has left the step yet.
  void slices_written();
  /// Called when all ranks have written theirs.
  void step_ended();

 private:
  /// A sample of the parameters' values, and how often this rank has written them.
  struct Seen {
    uint64_t sample, versions;
  };
  /// A rank's note, which all ranks of its machine read.
  struct Note {
    uint64_t sample;  ///< of its slices, when it has stepped them
    uint64_t loaded;  ///< see loaded()
    uint64_t period;  ///< the steps and broadcasts before that
  };
  Note& note_of(int rank) const { return reinterpret_cast<Note*>(notes_.mutable_data_ptr<int64_t>())[rank]; }
  Note& own_note() const { return note_of(areas_.rank()); }
  uint64_t loaded_by(int rank) const;
  bool changed() const;
  /// The ranks that have loaded different states, or none; empty if all have loaded the same. For ranks of one machine.
  std::string of_loads() const;
  Seen look() const;
  /// Combines the samples of all slices, in rank order.
  Seen seen_of(const std::vector<uint64_t>& samples) const;

  const Group group_;
  const Areas& areas_;
  const at::Tensor notes_;  ///< a Note of each rank, in shared memory
  uint64_t period_ = 1;     ///< steps and broadcasts so far, equal on every rank
  Seen seen_{};             ///< at the end of a step, or when this library set them
  const Entry entry_;
};

}  // namespace lockstep::detail
