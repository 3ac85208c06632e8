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

/// PyTorch's options, with PyTorch's defaults.
struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// False: every method behaves as if there were no scaler, but for the first unscale() or step(), which compares this
  /// option with that of the other ranks.
  bool enabled = true;
};

/// Keeps gradients in the range of half: multiplies the loss by a scale, and divides the gradients by it before the
/// optimizer's step. A step with infinity or NaN in a gradient is skipped, and the scale is lowered. bfloat16 has the
/// range of float and needs no scaler.
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
/// gradients were averaged (no_sync, post-local SGD, parameters_to_ignore). For this, unscale(), or step() without it,
/// is a collective of 48 bytes that every rank must call, also from the `shadow` of join(). These calls are an Error on
/// all ranks if a rank ran a backward, even one of several passes, without scale(), because the sum would mix two
/// scales, or if only some ranks call unscale(). Gradients scaled by hand, with get_scale(), count as not scaled: pass
/// every loss through scale(). Adding an unscaled part to a scaled loss is an Error where LibTorch's own operations add
/// it. So are LibTorch's nonlinear functions of a scaled loss, such as pow() and clamp(), abs(), relu() and max() with
/// a constant, and losses of two scalers in one backward.
///
/// Where a DistributedDataParallel reduces the gradients, these changes between backward() and unscale() are an Error
/// on all ranks: some rank cleared gradients, or all ranks cleared all of them; a rank changed their values, as
/// clipping does; or a rank changed parameters, as the optimizer's own step does. The next backward, step() or update()
/// throws, and the destructor warns if none follows. Clamp weights after step(). Stepping two optimizers in different
/// orders on different ranks is an Error, too.
///
/// If the optimizer's own step() is called after the gradients are divided, the next update() or step() throws Error if
/// the gradients hold infinity, which is then in the parameters, or if step() had already used them. This is detected
/// for LibTorch's SGD on a CPU, and by the state of its other optimizers, if that step comes before the next backward.
/// On the rank concerned, it is also an Error if all gradients were cleared between unscale() and step() or, without
/// such a replica, if gradients were never cleared after a step or, on a rank that decides alone, became infinite after
/// unscale().
///
/// Cannot be combined with NonFinitePolicy::kSkip, which removes the gradients before the scaler sees them: the first
/// step throws Error.
class GradScaler {
 public:
  /// For gradients that concern only this process, or that a DistributedDataParallel or FullyShardedDataParallel
  /// reduces: its ranks then decide together, as with their group, except within no_sync() and join(). If the program
  /// averages gradients itself, by all_reduce() say, the scaler cannot know it, and ranks that decide alone skip
  /// different steps: pass the group.
  explicit GradScaler(GradScalerOptions options = {});
  /// The ranks of `group` decide together.
  explicit GradScaler(const Group& group, GradScalerOptions options = {});
  /// Not copyable: two copies would change their scales independently, so that one divides what the other has
  /// multiplied. Pass it by reference.
  GradScaler(const GradScaler&) = delete;
  GradScaler& operator=(const GradScaler&) = delete;
  /// Afterwards `other` may only be destroyed or assigned to; its other methods fail by TORCH_CHECK.
  GradScaler(GradScaler&& other) noexcept;
  GradScaler& operator=(GradScaler&& other) noexcept;
  /// Warns if an optimizer was stepped directly, as described above, and no later call could report it.
  ~GradScaler();

  /// Returns outputs * scale, for backward(). If `outputs` was computed from a scaler's result, or the scale has
  /// changed when its backward runs, the next unscale() or step() throws on all ranks, as it does for other misuse of
  /// the result.
  at::Tensor scale(const at::Tensor& outputs) const;

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and checks whether any rank's contain
  /// infinity or NaN. Every rank must call it. Throws Error on all ranks within accumulate() before the pass that
  /// reduces, and before the last virtual rank's backward. TORCH_CHECK fails if it has already been called since
  /// update(), on all ranks if none of them has a gradient (unless all called skip_step()), and for gradients in half
  /// precision: keep parameters in float.
  void unscale(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step() unless some rank's gradients contain infinity or NaN, or all ranks called skip_step().
  /// Returns whether it stepped. Unscales if unscale() has not been called since update(). Every rank must call it,
  /// with each optimizer at most once before update(). Throws Error if a scaled backward has reached the parameters
  /// since unscale().
  bool step(torch::optim::Optimizer& optimizer);

  /// Call it after the steps of all optimizers. Lowers the scale by backoff_factor if one of them was skipped, and
  /// raises it by growth_factor after growth_interval updates in a row without a skipped step; steps that all ranks
  /// left out by skip_step() count for neither. If given, `new_scale` is used instead; it may be set before any step,
  /// but throws Error while gradients have the old scale. Throws Error without a step since the last update(): on all
  /// ranks if one rank has none, after scale(), of a scaler with a group. Throws Error if the scale would fall below
  /// every normal float: no step has then been finite since it was large.
  void update(std::optional<double> new_scale = {});

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }

  /// Python's layout: {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}; empty if not
  /// enabled.
  c10::IValue state_dict() const;
  /// The reverse, for files from either language. Throws Error, before anything is changed, if an entry is missing, or
  /// if gradients that a DistributedDataParallel reduces are still scaled; with other gradients step() throws.
  void load_state_dict(const c10::IValue& state);

 private:
  struct Found {
    bool infinity;
    bool nothing;  ///< all ranks called skip_step()
    bool stepped = false;
    uint64_t passes = 0;  ///< scaled backward passes of the scaler until the gradients were divided
    std::vector<at::Tensor> parameters;
    /// Of unscale(): its gradients may be zeros in step(), because they were zeros before.
    bool may_be_cleared = true;
    /// Of unscale(), on a rank that decides alone: mark_of() of the gradients.
    std::vector<uint64_t> marks{};
  };
  /// unscale(), or the unscaling part of step(). `call` names it.
  Found unscale_in(const char* call, torch::optim::Optimizer& optimizer);
  /// {infinity or NaN found, gradient found} on this rank, after unscaling.
  at::Tensor unscale_local(torch::optim::Optimizer& optimizer) const;
  /// Describes the backward passes of this rank that ran without scale() since the last update(): "" if none did, else
  /// "ran backward" or "ran 1 of 2 backward passes".
  std::string unscaled_passes(torch::optim::Optimizer& optimizer, const std::optional<KnownGradients>& known) const;
  /// Describes, as a predicate, other misuse on this rank before `call`; empty if none.
  std::string trouble_before(const char* call, const std::unordered_set<const c10::TensorImpl*>& parameters,
                             const std::optional<KnownGradients>& known) const;
  /// Throws if the gradients have been cleared since unscale(), or have become infinite.
  static void check_gradients_since(torch::optim::Optimizer& optimizer, const Found& found);
  /// Throws if scaled passes since unscale() have reached the parameters. `identity` is the optimizer's.
  void check_later_passes(uint64_t identity, const Found& found);
  void check_usable() const;
  /// Of a scaler that is not enabled, once: throws on all ranks if it is enabled on some.
  void tell_disabled(torch::optim::Optimizer& optimizer);

  /// Reports an update() without a step().
  [[noreturn]] void refuse_update();

  GradScalerOptions options_;
  std::optional<Group> group_;
  float scale_;      ///< a float in Python too
  float finite_at_;  ///< the scale when a step was last without infinity, or the first one
  int64_t growth_tracker_ = 0;
  bool has_told_disabled_ = false;
  /// The passes through the results of scale() since update(); null: not enabled, or moved from.
  std::shared_ptr<ScaledPasses> passes_;
  std::shared_ptr<DividedGradients> divided_;
  std::shared_ptr<UsedGradients> used_;
  std::optional<uint64_t> loaded_after_;  ///< passes before a load_state_dict() that came between them and update()
  mutable bool scaled_ = false;           ///< scale() was called since update()
  mutable std::string trouble_;           ///< of scale(); the next step() tells it to all ranks
  std::map<uint64_t, Found> found_;       ///< since update(), by optimizer identity
};

}  // namespace lockstep
