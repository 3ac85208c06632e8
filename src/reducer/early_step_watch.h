#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Notices an optimizer that steps while gradients of accumulate() or no_sync() wait in .grad, not yet reduced. The
/// optimizer need not be known to this library: the parameters show it. Those on a device do not, since reading them
/// waits for it.
class EarlyStepWatch {
 public:
  /// Remembers some of the parameters that passes have reached.
  void remember(const std::vector<at::Tensor>& parameters, const std::vector<bool>& reached);
  void forget() { seen_.clear(); }
  /// A parameter that something other than this library has changed since.
  std::optional<size_t> found(const std::vector<at::Tensor>& parameters) const;

 private:
  std::vector<std::pair<size_t, uint64_t>> seen_;  ///< parameters, and samples of them
  uint64_t weights_set_ = 0;                       ///< times_weights_were_set()
};

}  // namespace lockstep
