#include <functional>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"
#include "reducer/reducer.h"
#include "reducer/same_number.h"

// How buckets travel: in order, by the group itself or by a communication hook, and what is said when they do not.

namespace lockstep {
namespace {

constexpr const char* kSameNumber =
    "Every rank must run the same number of backward passes; where ranks have different numbers of batches, "
    LOCKSTEP_WITHIN_JOIN;

}  // namespace

void Reducer::launch_buckets(bool at_end) {
  const size_t end = at_end ? buckets_.size() : buckets_.size() - 1;
  for (; backward_.launched < end && buckets_[backward_.launched].full(); ++backward_.launched)
    launch(buckets_[backward_.launched]);
}

double Reducer::weight() const {
  // A virtual rank's gradients are multiplied before they are added.
  return fixed_.settings.reduction == GradientReduction::kWeightedMean && !virtual_ ? message_.facts.weight : 1;
}

void Reducer::launch(Bucket& bucket) {
  at::NoGradGuard no_grad;
  const OperationLabel label(fixed_.labels[backward_.launched]);
  if (weight() != 1) weight() == 0 ? bucket.gradients().zero_() : bucket.gradients().mul_(weight());
  try {
    const bool last = backward_.launched + 1 == buckets_.size();
    if (equipment_.timeline) equipment_.timeline->launched(backward_.launched);
    CommHook* const hook = virtual_ ? exchange_of(backward_.launched) : equipment_.hook.get();
    if (hook != nullptr)
      note_hook(backward_.launched, bucket.launch_by(*hook, fixed_.group, fixed_.op(),
                                                     static_cast<int64_t>(backward_.launched), last));
    else
      bucket.launch(fixed_.group, fixed_.op());
  } catch (const Error& error) {
    throw Error("the gradients of " + fixed_.describe(backward_.launched) + " could not be sent: " + error.what() +
                (message_.trouble.empty() ? "" : "\nThis rank had found before: " + message_.trouble));
  }
}

void Reducer::note_hook(size_t bucket, const std::string& problem) {
  if (problem.empty() || !message_.trouble.empty()) return;
  message_.trouble = "the communication hook " + problem + " (at " + fixed_.describe(bucket) + ")";
  // If it has not started what the other ranks' hooks have, their next collectives do not match, and nothing can be
  // told by one.
  try {
    if (const auto& store = state_of(fixed_.group).store) store->set(hook_key(fixed_.group.rank()), message_.trouble);
  } catch (const std::exception&) {
  }
}

std::string Reducer::hook_key(int rank) const {
  return "hook_problem/" + std::to_string(fixed_.settings.object) + "/" + std::to_string(reductions_) + "/" +
         std::to_string(rank);
}

std::string Reducer::hook_problems() const {
  const auto& store = state_of(fixed_.group).store;
  std::string text;
  if (!store || (equipment_.hook == nullptr && !virtual_)) return text;
  try {
    for (int rank = 0; rank < fixed_.group.world_size(); ++rank)
      if (store->check({hook_key(rank)}))
        text += "\nrank " + std::to_string(rank) + ": " + store->get_to_str(hook_key(rank));
  } catch (const std::exception&) {  // the store has gone with a rank
  }
  return text;
}

void Reducer::wait(const std::function<void()>& say) {
  const auto start = Clock::now();
  if (equipment_.timeline) equipment_.timeline->waits();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const OperationLabel label(fixed_.labels[b]);  // of what a hook still has to do
    try {
      note_hook(b, buckets_[b].wait());
      if (buckets_[b].tail_waits()) {
        say();
        buckets_[b].reduce_tail(fixed_.group, fixed_.op());
      }
      if (equipment_.timeline) equipment_.timeline->done(b);
    } catch (const Error& error) {
      const std::string problems = hook_problems();
      throw Error("the gradients of " + fixed_.describe(b) + " could not be reduced: " + error.what() + problems +
                  "\n" +
                  (!message_.trouble.empty() ? "This rank had found before: " + message_.trouble
                   : problems.empty()        ? kSameNumber
                                             : "A communication hook must not fail on some ranks alone") +
                  " (this was reduction " + std::to_string(reductions_ + 1) + " of this rank).");
    }
  }
  waited_seconds_ += seconds_since(start);
}

}  // namespace lockstep
