#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <lockstep/state_dict.h>

namespace lockstep {

class ModuleWatch;

struct EmaOptions {
  /// One average for each decay. A decay of d averages over roughly the last 1 / (1 - d) steps.
  std::vector<double> decays = {0.9999};
  /// Let the decay rise from 0, so that the poor weights of the first steps are soon forgotten. In update n it is 1 -
  /// (1 + s / warmup_gamma)^-warmup_power with s = n - 1 - update_after_step, but at most the average's decay. This is
  /// the formula of timm's ModelEmaV3, which took it from k-diffusion's EMAWarmup (K. Crowson). With gamma 1 a power of
  /// 2/3 reaches 0.999 after 31,600 steps and 0.9999 after 1,000,000; a power of 1 after 1,000 and 10,000.
  bool warm_up = false;
  double warmup_gamma = 1;
  double warmup_power = 2.0 / 3;
  double min_decay = 0;  ///< at least 0; no decay is below it
  /// During the first updates, this many, the averages equal the model.
  int64_t update_after_step = 0;
  /// Average floating-point buffers, such as the running statistics of batch norm, like parameters. False: the averaged
  /// model has the live model's buffers. Integer buffers, such as num_batches_tracked, are always the live model's.
  bool average_buffers = true;
};

/// Exponential moving averages of a model's weights.
///
///     lockstep::Ema ema(*net, {.decays = {0.999, 0.9999}, .warm_up = true});
///     ...
///     optimizer.step();
///     ema.update();
///     {
///       const auto averaged = ema.averaged_weights();     // net has the averaged weights while this lives
///       evaluate(net);
///     }
///     checkpointer.add("ema", ema);
///     lockstep::save(ema.averaged_state(), "ema.pt");       // a state dict of the model, for Python too
///
/// Does not communicate: ranks that hold the same weights and make the same calls have the same averages, bit for bit.
/// A Checkpointer compares them. An Ema may be made before DistributedDataParallel or after it: until the first
/// update() the averages follow the weights that DistributedDataParallel or broadcast_parameters() sets to one rank's.
/// The Ema covers the parameters and buffers that the module has when it is made, and expects them to keep their device
/// and dtype. Make a new one after adding or replacing layers: for a module that is held by a shared_ptr, TORCH_CHECK
/// fails in the next call that finds another parameter or buffer (each update() looks at 64 layers, in turn). Averages
/// of 16-bit parameters have 32 bits, so that small steps are not lost. Used by one thread.
class Ema {
 public:
  explicit Ema(const torch::nn::Module& module, EmaOptions options = {});
  /// For a TorchScript module, or for tensors without a module.
  Ema(StateDict parameters, StateDict buffers, EmaOptions options = {});

  /// Call it after each step of the optimizer. Throws Error, as averaged_weights() does, if anything but its optimizer
  /// has changed weights that all ranks share in one copy.
  void update();
  int64_t updates() const { return updates_; }
  /// The decay that update `update`, counted from 1, uses for an average with decay `decay`.
  double decay_at(double decay, int64_t update) const;

  /// A state dict of the model with average `which` (its index in `decays`), with the model's names and dtypes. The
  /// tensors are copies.
  [[nodiscard]] StateDict averaged_state(size_t which = 0) const;

  class Guard;
  /// While the guard lives, the module has the weights of average `which`. Afterwards it has exactly its own again;
  /// changes made meanwhile are lost. The swap is in place, in the tensors that optimizers and DistributedDataParallel
  /// hold. Only one guard may exist at a time. Meanwhile TORCH_CHECK fails in update(), state_dict() and
  /// load_state_dict(), and a Checkpointer throws Error, because a checkpoint would store the averages as the model.
  [[nodiscard]] Guard averaged_weights(size_t which = 0);

  /// {"updates": n, "decays": [...], "averages": [{name: tensor}, ...]}
  [[nodiscard]] c10::IValue state_dict() const;
  /// The reverse. Throws Error before anything is changed, listing everything that does not fit.
  void load_state_dict(const c10::IValue& state);

 private:
  /// Tensors that share a name or memory count as one.
  struct Tracked {
    at::Tensor live;
    std::vector<at::Tensor> averages;  ///< one per decay; empty: the averaged model has the live tensor
  };
  void track(const StateDict& tensors, bool average);
  void check_not_swapped(const char* operation) const;
  void check_place(size_t which) const;
  /// Throws if several ranks have changed weights that exist in one copy for all.
  void check_weights(const char* operation) const;
  void check_covers_module(const char* operation) const;

  EmaOptions options_;
  std::weak_ptr<const torch::nn::Module> module_;  ///< null: unknown whether its tensors have changed
  std::shared_ptr<ModuleWatch> watch_;             ///< of module_; null without one
  std::vector<Tracked> tracked_;
  std::vector<std::pair<std::string, size_t>> names_;  ///< each name's index in tracked_
  int64_t updates_ = 0;
  bool swapped_ = false;
  std::shared_ptr<const void> before_first_update_;  ///< follows broadcasts while it exists
};

/// Gives the module its own weights back when it is destroyed.
class Ema::Guard {
 public:
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

 private:
  friend class Ema;
  Guard(Ema& ema, size_t which);

  Ema& ema_;
  std::vector<std::pair<at::Tensor, at::Tensor>> own_;  ///< the module's tensors, and copies of their values
  std::vector<const void*> storages_;                   ///< of the module's tensors
};

}  // namespace lockstep
