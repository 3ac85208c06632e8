#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/named_tensors.h>

#include "base/virtual_ranks.h"

namespace lockstep {

/// A module's buffers (running statistics) on a rank that works for several virtual ranks. Each virtual rank's forward
/// starts from the buffers before the step. After the step the buffers are the first participating virtual rank's, as
/// if each were a separate process.
///
/// The buffers are saved at the end of a step, and again before the next step's first forward: when a loader enters the
/// first micro-batch, or at the first call of the model.
class VirtualBuffers {
 public:
  VirtualBuffers(const NamedTensors& buffers, const std::shared_ptr<VirtualRanks>& ranks);

  void before_forward();
  /// Tells that a virtual rank has computed its gradients, or was skipped. `last`: this rank's last one in the step.
  void virtual_rank_done(bool took_part, bool last);
  /// Ends the step: the buffers become those of the first virtual rank that took part.
  void step_done();

 private:
  static void copy(std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from);

  std::vector<at::Tensor> buffers_, before_, kept_;
  bool is_kept_ = false;      ///< a virtual rank of this rank has taken part
  bool untouched_ = true;     ///< no forward has run since the last step
  bool within_step_ = false;  ///< a virtual rank of this rank is done
  std::shared_ptr<void> listening_;
};

}  // namespace lockstep
