#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/comm_hook.h>
#include <lockstep/group.h>

#include "reducer/bucket.h"

namespace lockstep {

/// A full bucket on its way: its reduction over all ranks, by the group itself or by a communication hook. A hook works
/// on the bucket's gradients only; the tail is always reduced as it is, because flags would not survive compression.
class BucketTransfer {
 public:
  /// The bucket outlives it and stays where it is.
  explicit BucketTransfer(Bucket& bucket) : bucket_(bucket) {}

  /// Starts the reduction.
  void start(const Group& group, ReduceOp op);
  /// The same through a communication hook, to which this is bucket `index`. Returns what the hook has done wrong;
  /// empty if nothing. The tail of the last bucket waits for reduce_tail(), so that it can say what hooks end with.
  std::string start_through(CommHook& hook, const Group& group, ReduceOp op, int64_t index, bool last);
  bool is_under_way() const { return work_.has_value() || tail_waits_; }
  /// Waits until the reduction is done. Returns what the hook has done wrong; empty if nothing.
  std::string wait();
  /// After wait(): whether the tail has yet to be reduced.
  bool tail_waits() const { return tail_waits_; }
  void reduce_tail(const Group& group, ReduceOp op);
  /// Waits for what is under way, because the engine may still write into the bucket, and forgets it.
  void abandon();

 private:
  Bucket& bucket_;
  std::optional<Work> work_;              ///< of the whole bucket, or of its tail if there is a hook
  CommHook::Finish finish_;               ///< the hook's
  at::Tensor handed_;                     ///< what the hook was given as gradients(): a view of its own
  std::vector<at::Tensor> handed_parts_;  ///< and as the gradients of parameters
  bool tail_waits_ = false;
};

}  // namespace lockstep
