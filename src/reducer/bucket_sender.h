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

/// How buckets travel: in the order of the plan, by the group itself or by communication hooks, and what is thrown when
/// they do not. Every rank sends all buckets in the same order, whatever its own graph looked like, so ranks may use
/// different parameters in a step.
///
/// The last bucket carries the table of facts in its notes. Therefore it is sent only at the end, and its tail, with
/// the table, only when all hooks have ended, so that it can tell what they ended with.
class BucketSender {
 public:
  /// All of them outlive it.
  BucketSender(Buckets& buckets, const ReductionPlan& plan, const ReductionEquipment& equipment, RankMessage& message,
               HookProblems& hook_problems);

  /// From now on the bucket travels by this hook; null: by the group itself.
  void send_through(size_t bucket, CommHook* hook);
  void send_all_through(CommHook* hook);

  /// A reduction begins: waits for what an exception has left under way, and forgets it.
  void begin();
  /// How many reductions have begun.
  uint64_t begun() const { return begun_; }
  /// Buckets sent in this reduction: the first so many.
  size_t sent() const { return sent_; }
  bool is_under_way(size_t parameter) const { return transfers_[plan_.places[parameter].bucket].is_under_way(); }

  /// Sends every bucket that is full and comes next. `at_end`: with the last one. The one place where gradients go to
  /// the other ranks.
  void send_full(bool at_end);
  /// Waits for all buckets. `write_facts` writes the table once more where a hook's end comes before that.
  void wait(const std::function<void()>& write_facts);
  /// Moves the gradients that came when their bucket was under way out of .grad. Whether there were any.
  bool set_aside_late();
  /// After wait(), on all ranks if one of them has late gradients: reduces those as well, and adds them.
  void reduce_late();

  /// Seconds that backward has waited for communication so far. Any thread may call it.
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
