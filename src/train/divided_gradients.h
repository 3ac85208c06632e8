#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "reducer/gradient_marks.h"

namespace lockstep {

/// Gradients that a GradScaler has divided, of parameters that no reducer follows. Finds out whether a scaled backward
/// has added to them since, before or after a step() used them, which would mix two scales.
class DividedGradients {
 public:
  /// `of` is a number for these, such as the identity of their optimizer.
  void add(uint64_t of, std::vector<at::Tensor> parameters);
  /// Tells that a step() uses them. Returns whether a scaled backward has changed one.
  bool use(uint64_t of);
  /// Whether a scaled backward has added to gradients of these parameters that were used and not cleared.
  bool added_to_used(const TensorSet& parameters) const;
  /// Forgets gradients that no step() has used.
  void clear();

  /// Called when a scaled backward begins, and when it has ended. Autograd's threads may call.
  void backward_begins();
  void backward_ends();
  bool any() const;

 private:
  /// A gradient that a step() has used.
  struct Used {
    uint64_t mark;             ///< 0: it was cleared or changed since
    bool is_added_to = false;  ///< by a scaled backward; `mark` is the sum's
  };
  struct Divided {
    std::vector<at::Tensor> parameters;
    std::vector<uint64_t> marks;  ///< of the gradients; empty: no scaled backward is running
    bool is_mixed = false;
    std::vector<Used> used{};  ///< empty: no step() has used them
  };

  mutable Mutex mutex_;
  std::map<uint64_t, Divided> divided_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
