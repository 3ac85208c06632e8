#pragma once

#include <deque>
#include <optional>
#include <vector>

#include "fully_sharded/machine_groups.h"
#include "fully_sharded/part_gradients.h"
#include "fully_sharded/scaled_parts.h"
#include "fully_sharded/unit.h"
#include "fully_sharded/use_check.h"

namespace lockstep::fully_sharded {

/// Brings the sum of all ranks' gradients of a unit to the ranks that hold its parts: within the machine by a sum in
/// shared memory, at once; between machines while backward goes on. What a backward has computed is in the parts' .grad
/// when it has ended.
class GradientParts {
 public:
  GradientParts(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check);

  /// Takes the unit's gradients out of .grad, but such as cannot be added: returns why. Every rank calls it, for the
  /// same units in the same order, once in a backward.
  std::string add(size_t unit);
  bool has(size_t unit) const { return sums_[unit].defined(); }
  /// The mean over the ranks, into the parts' .grad, or added to it. A parameter that no rank has used keeps it. Every
  /// rank calls it at the end of a backward. Throws on all ranks if `trouble` is not empty on some.
  void finish(const std::string& trouble);

  /// A backward begins.
  void begin() { before_ = changes_of_gradients(units_); }

  ScaledParts& scaled() { return scaled_; }

  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  struct UnderWay {
    Work sums;
    UseCheck::Sent word;
  };
  std::string collect(Unit& unit, size_t number, const at::Tensor& memory);
  void check_same_before(const int32_t* had) const;
  void finish_under_way();
  [[noreturn]] void refuse_scale_on_some(bool is_scaled) const;
  [[noreturn]] void refuse_zeros_on_some() const;
  at::Tensor memory_for_sums(size_t unit);

  const MachineGroups& groups_;
  std::deque<Unit>& units_;
  UseCheck& check_;
  at::Tensor gradients_;            ///< bytes: this rank's, of one unit
  at::Tensor rail_sums_;            ///< bytes: of this machine, what this rank's rail adds up
  std::vector<at::Tensor> kept_;    ///< where a unit's sums lie that parts have as .grad
  std::vector<at::Tensor> sums_;    ///< of this backward, by unit: this rank's slice
  std::vector<size_t> first_flag_;  ///< of each unit, in used_
  size_t parameters_ = 0;
  /// Of each parameter, whether this rank has reached it; of each, whether its part had a gradient before this
  /// backward; and whether there is a trouble.
  at::Tensor used_;  // and two more: whether gradients were set to zero, or kept, before this backward
  GradientChanges before_;
  std::optional<UnderWay> under_way_;
  int64_t bytes_sent_ = 0;
  ScaledParts scaled_;
};

}  // namespace lockstep::fully_sharded
