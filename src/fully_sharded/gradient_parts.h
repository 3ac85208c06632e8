#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "fully_sharded/machine_groups.h"
#include "fully_sharded/unit.h"
#include "fully_sharded/use_check.h"

namespace lockstep::fully_sharded {

/// Brings the sum of all ranks' gradients of a unit to the ranks that hold its parts: within the machine by a sum in
/// shared memory, at once; between machines while backward goes on. What a backward has computed is in the parts' .grad
/// when it has ended.
class GradientParts {
 public:
  GradientParts(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check);

  /// Takes the unit's gradients out of .grad. TORCH_CHECK fails for such as cannot be added. Every rank calls it, for
  /// the same units in the same order, once in a backward.
  void add(size_t unit);
  bool has(size_t unit) const { return sums_[unit].defined(); }
  /// The mean over the ranks, into the parts' .grad, or added to it. A parameter that no rank has used keeps it. Every
  /// rank calls it at the end of a backward.
  void finish();

  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  struct UnderWay {
    Work sums;
    UseCheck::Sent word;
  };
  void collect(Unit& unit, size_t number, const at::Tensor& memory);
  void finish_under_way();
  at::Tensor memory_for_sums(size_t unit);

  const MachineGroups& groups_;
  std::deque<Unit>& units_;
  UseCheck& check_;
  at::Tensor gradients_;            ///< bytes: this rank's, of one unit
  at::Tensor rail_sums_;            ///< bytes: of this machine, what this rank's rail adds up
  std::vector<at::Tensor> kept_;    ///< where a unit's sums lie that parts have as .grad
  std::vector<at::Tensor> sums_;    ///< of this backward, by unit: this rank's slice
  std::vector<size_t> first_flag_;  ///< of each unit, in used_
  at::Tensor used_;                 ///< whether this rank has reached each parameter; then what all must have alike
  int32_t adding_up_ = 0;           ///< units whose parts had a gradient before this backward
  std::optional<UnderWay> under_way_;
  int64_t bytes_sent_ = 0;
};

}  // namespace lockstep::fully_sharded
