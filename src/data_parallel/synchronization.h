#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <lockstep/distributed_data_parallel_options.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

#include "data_parallel/attached_model.h"
#include "data_parallel/virtual_buffers.h"
#include "reducer/facts.h"

namespace lockstep {

/// Keeps parameters and buffers equal on all ranks, apart from the reduction of gradients.
class Synchronization {
 public:
  /// REQUIRES: the arguments outlive the object.
  Synchronization(const Group& group, const DistributedDataParallelOptions& options, const AttachedModel& model)
      : group_(group), options_(options), model_(model) {}

  /// Call it when the set of buffers has changed. TORCH_CHECK fails for a policy that is impossible with virtual ranks.
  void follow_buffers();
  /// Null unless there are several virtual ranks and buffers.
  VirtualBuffers* virtual_buffers() const { return virtual_buffers_.get(); }

  /// Called on all ranks after each reduction in which any rank had inputs. `step_looked`: an optimizer that takes the
  /// sum has checked the parameters before it wrote all ranks'.
  void after_reduction(const std::vector<Facts>& ranks, bool step_looked);
  /// See Replica::check_divergence_every().
  void check_every(int n_steps, bool buffers_as_left);
  int checks_every() const { return check_every_; }
  bool checks_buffers_as_left() const { return check_buffers_as_left_; }
  /// Runs that check if it is due, before an optimizer writes parameters of all ranks. `counted_later`: the reduction
  /// is counted after the step.
  /// REQUIRES: every rank calls it, in a step in which all have inputs.
  void check_before_step(bool counted_later) const;
  void check_divergence() const;
  /// Replaces the tensors by their weighted mean over the ranks; those without a mean follow `root`.
  void average(const NamedTensors& tensors, double share, int root) const;
  /// The number of steps made void by skip_step().
  int64_t void_steps() const { return void_steps_; }

 private:
  /// Copies buffers from ranks for which `counts` is true.
  void synchronize_buffers(const std::vector<bool>& counts) const;
  /// Checks the buffers. `as_left`: only those that every rank computes alike.
  void check_buffers(bool as_left) const;
  NamedTensors named_parameters() const;

  const Group& group_;
  const DistributedDataParallelOptions& options_;
  const AttachedModel& model_;
  std::unique_ptr<VirtualBuffers> virtual_buffers_;
  int check_every_ = 0;
  bool check_buffers_as_left_ = false;
  int64_t reductions_ = 0;  ///< since check_every() was called
  int64_t void_steps_ = 0;
};

}  // namespace lockstep
