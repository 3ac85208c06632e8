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

/// Brings the sum of all ranks' gradients of a unit to the ranks that hold its parts: within the machine at once, by a
/// sum in shared memory; between machines while backward continues. When a backward has ended, its gradients are in the
/// parts' .grad.
///
/// A rank has memory for its gradients of one unit, and the machine's sum replaces this rank's piece of them. While the
/// piece is on its way to the other machines, gradients of the next unit that would lie in it stay in .grad.
///
/// Gradients of 16 bits are added and divided in float and rounded once, so that they have the same bits on any
/// machines: if both machines and ranks within them add, gradients are kept and sent in float, and the mean is rounded.
class GradientParts {
 public:
  GradientParts(const MachineGroups& groups, std::deque<Unit>& units, UseCheck& check);

  /// Called within the unit's backward, when .grad has a gradient: takes the unit's gradients out of .grad where this
  /// is possible already, so that autograd holds few at a time. Does not wait.
  void take(size_t unit);
  /// Takes the unit's gradients out of .grad, except any that cannot be added, for which it returns the reason, and
  /// adds the ranks'.
  /// REQUIRES: every rank calls it, for the same units in the same order, once in a backward.
  std::string add(size_t unit);
  bool has(size_t unit) const { return means_[unit].defined(); }
  /// Puts the mean over the ranks into the parts' .grad, or adds it to that. A parameter that no rank has used keeps
  /// its .grad. Throws on all ranks if `trouble` is not empty on some.
  /// REQUIRES: every rank calls it at the end of a backward.
  void finish(const std::string& trouble);

  /// Called when a backward begins.
  void begin() { before_ = changes_of_gradients(units_); }

  ScaledParts& scaled() { return scaled_; }

  int64_t bytes_sent() const { return bytes_sent_; }

 private:
  struct UnderWay {
    Work sums;
    UseCheck::Sent word;
    at::Tensor sum, mean;    ///< what arrives, and where its mean goes: the same, unless types differ
    std::byte *begin, *end;  ///< of the gradients that are on their way
  };
  bool is_under_way(const at::Tensor& gradient) const;
  /// Whether ranks of a machine add first and machines then.
  bool adds_twice() const { return groups_.here() != nullptr && groups_.rail() != nullptr; }
  /// The type in which the unit's gradients are kept and sent.
  at::ScalarType added_type(const Unit& unit) const;
  /// Memory for this rank's gradients of the unit.
  at::Tensor own_gradients(const Unit& unit) const;
  std::string collect(size_t number);
  void check_same_before(const int32_t* had) const;
  void finish_under_way();
  [[noreturn]] void refuse_scale_on_some(bool is_scaled) const;
  [[noreturn]] void refuse_zeros_on_some() const;

  const MachineGroups& groups_;
  std::deque<Unit>& units_;
  UseCheck& check_;
  at::Tensor gradients_;            ///< bytes: this rank's gradients of one unit; gaps hold those of earlier ones
  std::vector<at::Tensor> means_;   ///< of this backward, by unit: this rank's slice
  std::vector<size_t> first_flag_;  ///< of each unit, in used_
  size_t parameters_ = 0;
  /// For each parameter, whether this rank has reached it; for each, whether its part had a gradient before this
  /// backward; and whether there is trouble.
  at::Tensor used_;  // and two more: whether gradients were set to zero, or kept, before this backward
  GradientChanges before_;
  std::optional<UnderWay> under_way_;
  int64_t bytes_sent_ = 0;
  ScaledParts scaled_;
};

}  // namespace lockstep::fully_sharded
