#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/group.h>

namespace lockstep {

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
/// it, is a collective of 24 bytes, which every rank must call, also from the `shadow` of join(). There a rank that ran
/// backward without scale() while others scaled is an Error on all ranks: the sum would have parts of two scales.
///
/// Cannot be combined with NonFinitePolicy::kSkip, which removes the gradients before the scaler sees them; step() says
/// so.
class GradScaler {
 public:
  /// For gradients that concern only this process, or that a DistributedDataParallel reduces: then its ranks decide
  /// together, as with their group, except within no_sync() and join().
  explicit GradScaler(GradScalerOptions options = {});
  /// Ranks of `group` decide together.
  explicit GradScaler(const Group& group, GradScalerOptions options = {});

  /// outputs * scale, for backward().
  at::Tensor scale(const at::Tensor& outputs) const;

  /// Divides the gradients of the optimizer's parameters by the scale, in place, and finds out whether any rank's
  /// contain infinity or NaN. Every rank must call it. TORCH_CHECK fails if it has already been called since update(),
  /// on all ranks if none of them has a gradient, and for gradients in half precision: keep parameters in float.
  void unscale(torch::optim::Optimizer& optimizer);

  /// Calls optimizer.step() unless some rank's gradients contain infinity or NaN; returns whether it did. Calls
  /// unscale() if that has not been called since update(). Every rank must call it, with each optimizer at most once
  /// before update().
  bool step(torch::optim::Optimizer& optimizer);

  /// After the steps of all optimizers: lowers the scale by backoff_factor if one of them was skipped, and raises it by
  /// growth_factor after growth_interval updates in a row without a skipped step. `new_scale`, if given, is used
  /// instead.
  void update(std::optional<double> new_scale = {});

  double get_scale() const { return options_.enabled ? scale_ : 1; }
  bool is_enabled() const { return options_.enabled; }

  /// Python's layout: {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}; empty if not
  /// enabled.
  c10::IValue state_dict() const;
  /// The reverse, for files from either language. Throws Error, before anything is changed, if something is missing.
  void load_state_dict(const c10::IValue& state);

 private:
  struct Found {
    bool infinity;
    bool stepped = false;
  };
  /// {infinity or NaN found, gradient found} on this rank, after unscaling.
  at::Tensor unscale_local(torch::optim::Optimizer& optimizer) const;
  /// Every rank of `ranks` calls it once one of them has scaled and another one seems not to have: throws Error if so.
  void refuse_unscaled(const Group& ranks, torch::optim::Optimizer& optimizer, std::optional<bool> contributed) const;

  GradScalerOptions options_;
  std::optional<Group> group_;
  float scale_;  ///< a float in Python too
  int64_t growth_tracker_ = 0;
  mutable bool scaled_ = false;  ///< scale() was called since update()
  std::map<const torch::optim::Optimizer*, Found> found_;  ///< since update()
};

}  // namespace lockstep
