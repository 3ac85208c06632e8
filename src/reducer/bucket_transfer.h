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

/// The transfer of a full bucket: its reduction over all ranks, by the group itself or by a communication hook. A hook
/// works only on the bucket's gradients. The tail is always reduced unchanged, because flags would not survive
/// compression.
class BucketTransfer {
 public:
  /// REQUIRES: the bucket outlives it and does not move.
  explicit BucketTransfer(Bucket& bucket) : bucket_(bucket) {}

  void start(const Group& group, ReduceOp op);
  /// Starts the reduction through a communication hook, as bucket `index`. Returns the hook's error; empty if none. The
  /// tail of the last bucket waits for reduce_tail(), so that it can report how the hooks ended.
  std::string start_through(CommHook& hook, const Group& group, ReduceOp op, int64_t index, bool last);
  bool is_under_way() const { return work_.has_value() || tail_work_.has_value() || tail_waits_; }
  /// Waits until the reduction is done, on a device only if `waits_for_device`; otherwise what this thread queues there
  /// next runs after it. Returns the hook's error; empty if none.
  std::string wait(bool waits_for_device);
  /// Whether the tail remains to be reduced, after wait().
  bool tail_waits() const { return tail_waits_; }
  void reduce_tail(const Group& group, ReduceOp op);
  /// Waits for a transfer in flight, because the engine may still write into the bucket, and discards it.
  void abandon();

 private:
  Bucket& bucket_;
  std::optional<Work> work_;              ///< of the bucket's message
  std::optional<Work> tail_work_;         ///< of its tail, if that is not a part of it or if there is a hook
  CommHook::Finish finish_;               ///< the hook's
  at::Tensor handed_;                     ///< the hook's gradients(): a separate view
  std::vector<at::Tensor> handed_parts_;  ///< the hook's gradients of parameters
  bool tail_waits_ = false;
};

}  // namespace lockstep
