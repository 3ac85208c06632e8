#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/group.h>

namespace lockstep {

class DividedGradients;
class ScaledPasses;
class UsedGradients;
struct KnownGradients;

/// PyTorch's options, with its defaults.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  bool enabled = true;  ///< false: every method behaves as if there were no scaler
};

/// Keeps gradients in the range of half: the loss is multiplied by a scale, and the gradients are divided by it before
/// the optimizer's step. A step with infinity or NaN in a gradient is skipped, and the scale is lowered. bfloat16 has
/// the range of float and needs no scaler.
///
///     lockstep::GradScaler scaler(context.group());
///     ...
///     scaler.scale(loss).backward();
///     scaler.unscale(optimizer);                             // only if the gradients are looked at, as clipping does
///     model.clip_grad_norm(1);
///     if (scaler.step(optimizer)) scheduler.step();
///     scaler.update();
///     checkpointer.add("scaler", scaler);
///
/// All ranks skip the same steps and have the same scale, whichever rank found infinity and whether or not its
/// gradients were averaged (no_sync, post-local SGD, parameters_to_ignore). For this, unscale(), or a step() without
/// it, is a collective of 48 bytes, which every rank must call, also from the `shadow` of join(). There a rank that ran
/// a backward, one of several passes too, without scale() is an Error on all ranks: the sum would have parts of two
/// scales. So is unscale() on some ranks only. Gradients that are scaled by hand, with get_scale(), count as not
/// scaled: let every loss go through scale(). A part that is added to a scaled loss without scale() is an Error where
/// LibTorch's own operations add it; so are LibTorch's functions of a scaled loss that are not linear, such as pow()
/// and clamp(), abs(), relu() and max() of one with a constant, and losses of two scalers in one backward.
///
/// Where a DistributedDataParallel reduces the gradients, it is an Error on all ranks that some rank cleared gradients
/// between backward() and unscale(), or all ranks all of them, or changed their values, as clipping does, or changed
/// parameters, as the optimizer's own step does: the next backward, step() or update() throws, and the destructor warns
/// if none comes. Clamp weights after step(). Ranks that step two optimizers in different orders are told as well.
///
/// An optimizer that is stepped by itself once the gradients are divided is an Error of the next update() or step() if
/// they hold infinity, which is in the parameters then, or if step() had used them: that is known of LibTorch's SGD on
/// a CPU, and of the state of its other optimizers, as long as the step comes before the next backward. So are, on the
/// rank that does it, gradients that were all cleared between unscale() and step(), and, without such a replica,
/// gradients that were never cleared after a step, or that became infinite after unscale() on a rank that decides
/// alone.
///
/// Cannot be combined with NonFinitePolicy::kSkip, which removes the gradients before the scaler sees them: an Error of
/// the first step.
class GradScaler {
 public:
  /// For gradients that concern only this process, or that a DistributedDataParallel or FullyShardedDataParallel
  /// reduces: then its ranks decide together, as with their group, except within no_sync() and join(). Where the
  /// program averages gradients itself, by all_reduce() say, nothing tells the scaler, and ranks that decide alone skip
  /// different steps: give it their group.
  explicit GradScaler(GradScalerOptions options = {});
  /// Ranks of `group` decide together.
  explicit GradScaler(const Group& group, GradScalerOptions options = {});
  /// Two of them would change their scales apart, so that one divides what the other has multiplied: pass it by
  /// reference.
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  /// `other` may only be destroyed or assigned to then; its other methods fail by TORCH_CHECK.
  GradScaler(GradScaler&& other) noexcept;
  GradScaler& operator=(GradScaler&& other) noexcept;
  /// Warns if an optimizer was stepped by itself, as above, and no call since could tell.
  ~GradScaler();

  /// outputs * scale, for backward(). If `outputs` was computed from what a scaler has scaled, or the scale is another
  /// when its backward runs, the next unscale() or step() throws on all ranks, as for whatever happens to the result.
  at::Tensor scale(const at::Tensor& outputs) const;

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and finds out whether any rank's
  /// contain infinity or NaN. Every rank must call it. Throws Error on all ranks within accumulate() before the pass
  /// that reduces, and before the last virtual rank's backward. TORCH_CHECK fails if it has already been called since
  /// update(), on all ranks if none of them has a gradient (unless all called skip_step()), and for gradients in half
  /// precision: keep parameters in float.
  void unscale(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step() unless some rank's gradients contain infinity or NaN; returns whether that stepped, which
  /// it does not where all ranks called skip_step(). Unscales if unscale() has not been called since update(). Every
  /// rank must call it, with each optimizer at most once before update(). Throws Error if a scaled backward has reached
  /// the parameters since unscale().
  bool step(torch::optim::Optimizer& optimizer);

  /// After the steps of all optimizers: lowers the scale by backoff_factor if one of them was skipped, and raises it by
  /// growth_factor after growth_interval updates in a row without a skipped step; steps that all ranks left out by
  /// skip_step() count for neither. `new_scale`, if given, is used instead, also before any step, but not while
  /// gradients have the old one: an Error. Throws Error without a step since the last update(): on all ranks if that is
  /// so on one, after scale(), of a scaler with a group. Throws Error if the scale would become smaller than every
  /// normal float: then no step since it was large has been finite.
  void update(std::optional<double> new_scale = {});

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }

  /// Python's layout: {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}; empty if not
  /// enabled.
  c10::IValue state_dict() const;
  /// The reverse, for files from either language. Throws Error, before anything is changed, if something is missing, or
  /// if gradients that a DistributedDataParallel reduces still have the scale; with other gradients step() throws.
  void load_state_dict(const c10::IValue& state);

 private:
  struct Found {
    bool infinity;
    bool nothing;  ///< all ranks called skip_step()
    bool stepped = false;
    uint64_t passes = 0;  ///< scaled backward passes of the scaler until the gradients were divided
    std::vector<at::Tensor> parameters;
    /// Of unscale(): its gradients may be zeros in step(), since they were.
    bool may_be_cleared = true;
    /// Of unscale(), of a rank that decides alone: the gradients' (mark_of()).
    std::vector<uint64_t> marks{};
  };
  /// unscale(), or step() which unscales: `call`.
  Found unscale_in(const char* call, torch::optim::Optimizer& optimizer);
  /// {infinity or NaN found, gradient found} on this rank, after unscaling.
  at::Tensor unscale_local(torch::optim::Optimizer& optimizer) const;
  /// Which of this rank's backward passes ran without scale() since the last update(): "" if none did, else "ran
  /// backward" or "ran 1 of 2 backward passes".
  std::string unscaled_passes(torch::optim::Optimizer& optimizer, const std::optional<KnownGradients>& known) const;
  /// What else this rank did wrong before `call`, as a predicate; empty if nothing.
  std::string trouble_before(const char* call, const std::unordered_set<const c10::TensorImpl*>& parameters,
                             const std::optional<KnownGradients>& known) const;
  /// Throws if the gradients have been cleared since unscale(), or have become infinite.
  static void check_gradients_since(torch::optim::Optimizer& optimizer, const Found& found);
  /// Throws if scaled passes since unscale() have reached the parameters. `identity`: the optimizer's.
  void check_later_passes(uint64_t identity, const Found& found);
  void check_usable() const;

  /// update() without a step().
  [[noreturn]] void refuse_update();

  GradScalerOptions options_;
  std::optional<Group> group_;
  float scale_;      ///< a float in Python too
  float finite_at_;  ///< the scale when a step was last without infinity, or the first one
  int64_t growth_tracker_ = 0;
  /// Those through what scale() has returned, since update(); null: not enabled, or moved from.
  std::shared_ptr<ScaledPasses> passes_;
  std::shared_ptr<DividedGradients> divided_;
  std::shared_ptr<UsedGradients> used_;
  std::optional<uint64_t> loaded_after_;  ///< load_state_dict() came between passes and update(), after so many
  mutable bool scaled_ = false;           ///< scale() was called since update()
  mutable std::string trouble_;           ///< of scale(), which the next step() tells all ranks
  std::map<uint64_t, Found> found_;       ///< since update(), by the optimizers' identities
};

}  // namespace lockstep
