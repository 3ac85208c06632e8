#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"

namespace lockstep {

/// Gradients that a GradScaler's unscale() has divided and no step() has used yet, of parameters that no reducer
/// follows: whether a scaled backward has added to them since, which would mix two scales.
class DividedGradients {
 public:
  /// `of`: a number for these, such as the identity of their optimizer.
  void add(uint64_t of, std::vector<at::Tensor> parameters);
  /// They are used now. Returns whether a scaled backward has changed one.
  bool remove(uint64_t of);
  void clear();

  /// A scaled backward begins, and has ended. Autograd's threads may call.
  void backward_begins();
  void backward_ends();
  bool any() const;

 private:
  struct Divided {
    std::vector<at::Tensor> parameters;
    std::vector<uint64_t> marks;  ///< of their gradients; empty: no scaled backward is running
    bool is_mixed = false;
  };

  mutable Mutex mutex_;
  std::map<uint64_t, Divided> divided_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
