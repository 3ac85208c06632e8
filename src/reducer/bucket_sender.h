#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "reducer/bucket_transfer.h"
#include "reducer/buckets.h"
#include "reducer/hook_problems.h"

namespace lockstep {

/// Sends buckets in the order of the plan, through the group itself or through communication hooks, and throws if they
/// fail. Every rank sends all buckets in the same order, whatever its own graph, so ranks may use different parameters
/// in a step.
///
/// The last bucket carries the table of facts in its notes, so it is sent only at the end. Its tail, with the table, is
/// sent only after all hooks have ended, so that it can report their failures.
class BucketSender {
 public:
  /// REQUIRES: the arguments outlive the sender.
  BucketSender(Buckets& buckets, const ReductionPlan& plan, const ReductionEquipment& equipment, RankMessage& message,
               HookProblems& hook_problems);

  /// From now on, sends the bucket through this hook; null: through the group itself.
  void send_through(size_t bucket, CommHook* hook);
  void send_all_through(CommHook* hook);

  /// Begins a reduction. Waits for transfers that an exception left in flight, and discards them.
  void begin();
  uint64_t begun() const { return begun_; }
  /// The number of buckets sent in this reduction, in the order of the plan.
  size_t sent() const { return sent_; }
  bool is_under_way(size_t parameter) const { return transfers_[plan_.places[parameter].bucket].is_under_way(); }

  /// Sends every bucket that is full and next in order. `at_end`: the last one too. Only this function sends gradients
  /// to other ranks.
  void send_full(bool at_end);
  /// Waits for all buckets. `write_facts` rewrites the table before a tail that waited for hooks to end.
  void wait(const std::function<void()>& write_facts);
  /// Moves gradients that arrived after their bucket was sent out of .grad. Returns whether there were any.
  bool set_aside_late();
  /// Reduces and adds late gradients. Called on all ranks, after wait(), if any rank has some.
  void reduce_late();

  /// Seconds for which backward has waited for communication so far. Any thread may call it.
  double waited_seconds() const { return waited_seconds_.load(std::memory_order_relaxed); }
  void add_waited_seconds(double seconds) { waited_seconds_ = waited_seconds() + seconds; }

 private:
  void note_hook_problem(size_t bucket, const std::string& problem);

  Buckets& buckets_;
  const ReductionPlan& plan_;
  const ReductionEquipment& equipment_;
  RankMessage& message_;
  HookProblems& hook_problems_;
  std::vector<BucketTransfer> transfers_;
  std::vector<CommHook*> hooks_;  ///< by bucket; null: the group itself
  size_t sent_ = 0;
  uint64_t begun_ = 0;
  std::atomic<double> waited_seconds_{0};
};

}  // namespace lockstep
