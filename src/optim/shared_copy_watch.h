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
  void were_set(const std::vector<const void*>& storages, uint64_t values) override;
  void before_broadcast(int root) override;

  /// The trouble when the optimizer that steps them ends, and each rank gets a copy of its own.
  std::string trouble_at_end() const;

  /// A hash of what this library has set them to on this rank since the last step or broadcast: all ranks load the
  /// same, or none does. 0: it has set nothing.
  uint64_t loaded() const { return loaded_by(areas_.rank()); }
  /// This rank has written its slices, and no rank has left the step yet.
  void slices_written();
  /// All ranks have written theirs.
  void step_ended();

 private:
  /// Of the parameters: a sample of their values; how often this rank has written them.
  struct Seen {
    uint64_t sample, versions;
  };
  /// What a rank notes where all of its machine read it.
  struct Note {
    uint64_t sample;  ///< of its slices, when it has stepped them
    uint64_t loaded;  ///< see loaded()
    uint64_t period;  ///< the steps and broadcasts before that
  };
  Note& note_of(int rank) const { return reinterpret_cast<Note*>(notes_.mutable_data_ptr<int64_t>())[rank]; }
  Note& own_note() const { return note_of(areas_.rank()); }
  uint64_t loaded_by(int rank) const;
  bool changed() const;
  /// Which ranks have loaded different states, or none; empty if all have loaded the same. For ranks of one machine.
  std::string of_loads() const;
  Seen look() const;
  /// Of the samples of all slices, in the order of ranks.
  Seen seen_of(const std::vector<uint64_t>& samples) const;

  const Group group_;
  const Areas& areas_;
  const at::Tensor notes_;  ///< a Note of each rank, in memory of all
  uint64_t period_ = 1;     ///< steps and broadcasts so far: as many on every rank
  Seen seen_{};             ///< when a step ended, or this library set them
  const Entry entry_;
};

}  // namespace lockstep::detail
