#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "reducer/gradient_marks.h"

namespace lockstep {

/// Which backward passes have put gradients into .grad of which parameters, since these were last none or zero: what a
/// GradScaler compares with the passes that went through scale(). Nothing is recorded while there is no such scaler.
class PassRecord {
 public:
  /// A backward begins.
  void begin(const std::vector<at::Tensor>& parameters);
  void reached(size_t parameter) {
    if (!current_.empty()) current_[parameter] = true;
  }
  /// The backward has ended; `number`: see current_backward().
  void end(int number);
  /// Forgets what was cleared, which .grad shows before a backward begins.
  void forget_cleared(const std::vector<at::Tensor>& parameters);
  /// No gradient of a recorded pass is left.
  void forget() { passes_.clear(); }

  /// The numbers of the passes whose gradients are in .grad of one of `chosen`.
  std::vector<int> numbers(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) const;

 private:
  struct Pass {
    int number;
    std::vector<bool> reached;  ///< by parameter
  };

  std::vector<Pass> passes_;
  std::vector<bool> current_;  ///< empty: the backward that is running is not recorded
};

}  // namespace lockstep
