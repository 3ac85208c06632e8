#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "reducer/gradient_marks.h"

namespace lockstep {

class ScaledPasses;

/// For PassRecord::stepped_beside(), after "parameter NAME ".
inline constexpr const char* kSteppedBesideScaler =
    "was changed while its gradient still had the scale of a GradScaler, as optimizer.step() does; call "
    "scaler.step(optimizer), which divides the gradients first, in its place";

/// Records which backward passes have put gradients into .grad of which parameters, since these were last none or zero.
/// A GradScaler compares this with the passes that went through scale(). Nothing is recorded while there is no such
/// scaler.
class PassRecord {
 public:
  /// Tells that a backward begins.
  void begin(const std::vector<at::Tensor>& parameters);
  void reached(size_t parameter) {
    if (!current_.empty()) current_[parameter] = true;
  }
  /// Tells that the backward has ended. `number`: see current_backward().
  void end(int number);
  /// Forgets cleared gradients, which .grad shows before a backward begins.
  void forget_cleared(const std::vector<at::Tensor>& parameters);
  /// Called when no gradient of a recorded pass is left.
  void forget() { passes_.clear(); }

  /// Marks the gradients and parameters as this library leaves them after a backward.
  void mark(const std::vector<at::Tensor>& parameters);
  /// Tells that a GradScaler has divided the gradients of `chosen`.
  void unscaled(const std::vector<at::Tensor>& parameters, const TensorSet& chosen);
  /// Whether .grad of one of `chosen` has the scale of a GradScaler. Null: of any parameter.
  bool still_scaled(const std::vector<at::Tensor>& parameters, const TensorSet* chosen) const;
  /// Whether .grad of any parameter has the present scale of this GradScaler.
  bool still_scaled_by(const ScaledPasses& scaled, const std::vector<at::Tensor>& parameters) const;
  /// A parameter that something other than a GradScaler's step, such as an optimizer's own step, has changed since
  /// mark() while its gradient was scaled. A parameter that a pass reaches only in passing, as a generator's loss
  /// reaches the discriminator, may change: such is one whose gradients a GradScaler divides at other times than those
  /// of the pass's other parameters.
  std::optional<size_t> stepped_beside(const std::vector<at::Tensor>& parameters) const;

  /// The passes whose gradients are in .grad of one of `chosen`.
  std::vector<RecordedPass> passes(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) const;
  /// The changes since mark() to gradients of `chosen` that are still scaled.
  GradientEdits edits(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) const;

 private:
  struct Pass {
    int number;
    std::vector<bool> reached;   ///< by parameter
    std::vector<bool> unscaled;  ///< by parameter
  };
  /// mark_of() a gradient (0: none) and of the parameter.
  struct Mark {
    uint64_t gradient, parameter;
  };

  /// A gradient without elements, such as of a part that is empty on this rank, shows it by its version.
  bool is_cleared_since_mark(const std::vector<at::Tensor>& parameters, size_t i) const;

  std::vector<Pass> passes_;
  std::vector<Mark> marks_;         ///< by parameter; empty: unknown
  std::vector<bool> divided_;       ///< by parameter: a GradScaler has divided its gradient once
  uint64_t weights_set_ = 0;        ///< times_weights_were_set() at mark()
  uint64_t set_without_state_ = 0;  ///< of these, the times without a state
  std::vector<bool> current_;       ///< empty: the running backward is not recorded
};

}  // namespace lockstep
