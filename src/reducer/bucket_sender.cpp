#include "reducer/bucket_sender.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "rank_page/operation_label.h"
#include "reducer/rank_agreement.h"

namespace lockstep {
BucketSender::BucketSender(Buckets& buckets, const ReductionPlan& plan, const ReductionEquipment& equipment,
                           RankMessage& message, HookProblems& hook_problems)
    : buckets_(buckets),
      plan_(plan),
      equipment_(equipment),
      message_(message),
      hook_problems_(hook_problems),
      hooks_(buckets.size()) {
  for (size_t b = 0; b < buckets.size(); ++b) transfers_.emplace_back(buckets[b]);
}

void BucketSender::send_through(size_t bucket, CommHook* hook) {
  hooks_[bucket] = hook;
  hook_problems_.expect(std::any_of(hooks_.begin(), hooks_.end(), [](const CommHook* one) { return one != nullptr; }));
}

void BucketSender::send_all_through(CommHook* hook) {
  for (size_t b = 0; b < hooks_.size(); ++b) send_through(b, hook);
}

void BucketSender::begin() {
  ++begun_;
  for (BucketTransfer& transfer : transfers_) transfer.abandon();
  buckets_.reset();
  sent_ = 0;
}

void BucketSender::send_full(bool at_end) {
  const size_t end = at_end ? buckets_.size() : buckets_.size() - 1;
  for (; sent_ < end && buckets_[sent_].full(); ++sent_) {
    at::NoGradGuard no_grad;
    const OperationLabel label(plan_.labels[sent_]);
    buckets_.apply_weight(buckets_[sent_]);
    try {
      if (equipment_.timeline) equipment_.timeline->sent(sent_);
      if (CommHook* const hook = hooks_[sent_])
        note_hook_problem(sent_,
                          transfers_[sent_].start_through(*hook, plan_.group, plan_.op(), static_cast<int64_t>(sent_),
                                                          /*last=*/sent_ + 1 == buckets_.size()));
      else
        transfers_[sent_].start(plan_.group, plan_.op());
    } catch (const Error& error) {
      throw Error("the gradients of " + plan_.describe(sent_) + " could not be sent: " + error.what() +
                  (message_.trouble().empty() ? "" : "\nBefore that, this rank had found: " + message_.trouble()));
    }
  }
}

void BucketSender::note_hook_problem(size_t bucket, const std::string& problem) {
  if (problem.empty() || !message_.trouble().empty()) return;
  message_.set_trouble("the communication hook " + problem + " (at " + plan_.describe(bucket) + ")");
  hook_problems_.post(message_.reductions(), message_.trouble());
}

void BucketSender::wait(const std::function<void()>& write_facts) {
  const auto start = Clock::now();
  if (equipment_.timeline) equipment_.timeline->waits();
  const bool is_timed = equipment_.timeline && equipment_.timeline->is_watched();
  for (size_t b = 0; b < transfers_.size(); ++b) {
    const OperationLabel label(plan_.labels[b]);  // of what a hook still has to do
    try {
      note_hook_problem(b, transfers_[b].wait(/*waits_for_device=*/is_timed));
      if (transfers_[b].tail_waits()) {
        write_facts();
        transfers_[b].reduce_tail(plan_.group, plan_.op());
      }
      if (equipment_.timeline) equipment_.timeline->done(b);
    } catch (const Error& error) {
      const std::string what = "the gradients of " + plan_.describe(b) + " could not be reduced: " + error.what();
      if (!plan_.group.is_open()) throw Error(what);
      const std::string problems = hook_problems_.of_all_ranks(message_.reductions());
      throw Error(what + problems + "\n" +
                  (!message_.trouble().empty() ? "Before that, this rank had found: " + message_.trouble()
                   : problems.empty()          ? "Every rank must run the same number of backward passes; " +
                                            advice_on_numbers(message_.facts().joining)
                                      : "A communication hook must not fail on some ranks alone") +
                  " (this was reduction " + std::to_string(message_.reductions() + 1) + " of this rank).");
    }
  }
  add_waited_seconds(seconds_since(start));
}

bool BucketSender::set_aside_late() {
  bool any = false;
  for (size_t b = 0; b < transfers_.size(); ++b)
    if (transfers_[b].is_under_way()) any |= buckets_[b].set_aside_late();
  return any;
}

void BucketSender::reduce_late() {
  const OperationLabel label("gradients that came late");
  at::NoGradGuard no_grad;
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const at::Tensor late = buckets_[b].late_gradients();
    const double weight = message_.weight();
    if (weight != 1) weight == 0 ? late.zero_() : late.mul_(weight);
    plan_.group.all_reduce(late, plan_.op());
    buckets_[b].gradients().add_(late);
  }
}

}  // namespace lockstep
