#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/backward_passes.h>

#include "reducer/bucket_sender.h"
#include "reducer/buckets.h"
#include "reducer/early_step_watch.h"
#include "reducer/facts.h"
#include "reducer/gradient_hook.h"
#include "reducer/hook_problems.h"
#include "reducer/pass_record.h"
#include "reducer/rank_agreement.h"
#include "reducer/rank_message.h"
#include "reducer/reduction_events.h"
#include "reducer/reduction_plan.h"

namespace lockstep {

/// The state of the backward that is running or ran last.
struct Backward {
  enum class Phase { kIdle, kInBackward, kAbandoned };
  std::atomic<Phase> phase = Phase::kIdle;
  bool reduces = false;      ///< whether it ends with a reduction
  bool accumulates = false;  ///< whether it is one of several that accumulate() reduces together
  bool is_nested = false;    ///< a nested one has run, so a parameter may get several gradients in one backward
  int number = -1;           ///< see current_backward()
  std::atomic<std::thread::id> thread{};  ///< the calling thread
  int captured = -1;                      ///< the last backward that captured gradients
  std::vector<bool> reached;              ///< parameters reached since the last reduction

  /// Whether this thread has begun it and it runs. The only thing here that may be asked without the tracker's mutex:
  /// no other thread changes the answer.
  bool is_of_this_thread() const {
    return phase.load(std::memory_order_relaxed) == Phase::kInBackward && !is_of_another_thread();
  }
  /// Called when a gradient arrives: records whether it belongs to a nested backward.
  void look_whether_nested() { is_nested = is_nested || current_backward() != number; }
  bool is_of_another_thread() const { return thread.load(std::memory_order_relaxed) != std::this_thread::get_id(); }
  void forget_reached() { reached.assign(reached.size(), false); }
};

/// The parts that every kind of reduction works with.
struct ReductionParts {
  ReductionParts(const NamedTensors& parameters, Group group, ReductionSettings settings, BackwardPasses& of,
                 ReductionEvents to)
      : plan(parameters, std::move(group), settings), passes(of), events(std::move(to)) {
    backward.reached.resize(parameters.size());
  }

  const ReductionPlan plan;
  BackwardPasses& passes;  ///< owned by the thread that calls backward
  const ReductionEvents events;
  ReductionEquipment equipment;
  RankMessage message{plan};
  HookProblems hook_problems{plan.group, plan.settings.object};
  RankAgreement agreement{plan, message, hook_problems, events};
  Buckets buckets{plan, equipment, message};
  BucketSender sender{buckets, plan, equipment, message, hook_problems};
  Backward backward;
  PassRecord record;
  EarlyStepWatch early_step;
  bool last_is_void = false;  ///< no rank took part in the last reduction
};

/// A way of reducing gradients, driven by the BackwardTracker and the Reducer. Its functions are called one at a time,
/// under the tracker's mutex.
class Reduction {
 public:
  Reduction() = default;
  virtual ~Reduction() = default;
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;

  /// Begins a reduction, with a backward or its substitute. Throws on all ranks if an exception ended this rank's last
  /// backward while it was sending gradients.
  virtual void begin() = 0;
  /// Called when the reduction has begun with a backward.
  virtual void backward_begins() = 0;
  /// Called before a gradient of the parameter is accumulated into .grad.
  virtual void before_gradient(size_t parameter) = 0;
  /// Whether before_gradient() does anything in the backward passes of this rank.
  virtual bool acts_before_gradients() const = 0;
  /// Called after a gradient of the parameter was accumulated into .grad.
  virtual void ready(size_t parameter) = 0;
  /// Called when the outermost backward has computed all gradients.
  virtual void backward_ended() = 0;
  /// Reduces the gradients in .grad.
  virtual void reduce() = 0;
  /// Called when this rank contributes nothing to the step.
  virtual void skip() = 0;
  /// Called when this rank is out of inputs and takes part for the others. Returns the facts of all ranks; none if that
  /// takes a whole optimizer step, which the caller must run.
  virtual std::optional<std::vector<Facts>> shadow() = 0;
  /// Takes part only to report an error: throws it on all ranks.
  virtual void fail(const std::string& trouble) = 0;
  virtual void equipment_changed() {}
  /// Whether gradients of earlier backward passes wait for an optimizer's step.
  virtual bool gradients_wait() const { return false; }
};

bool is_in_backward_elsewhere(const ReductionParts& parts);
/// Thrown on all ranks when one thread runs a backward while another steps.
inline constexpr const char* kBesideStep =
    "a thread ran a backward of a model while another was between settling and stepping its ZeroRedundancyOptimizer; "
    "run step() and clip_grad_norm() when all backward passes of the model have ended, and the next backward after "
    "step() has returned";

/// Begins a reduction: empties the buckets and restarts the watch and the timeline.
void begin_reduction(ReductionParts& parts);
/// Whether an exception ended this rank's last backward after it had sent buckets, so that the others wait for the
/// remaining ones.
bool is_interrupted(const ReductionParts& parts);
/// Called if is_interrupted() and this rank has begun another reduction.
void note_interruption(ReductionParts& parts);
/// Called when all ranks have the result in their buckets. Leaves it in .grad, or leaves no .grad if the step is void.
void end_reduction(ReductionParts& parts, const std::vector<Facts>& ranks);

}  // namespace lockstep
