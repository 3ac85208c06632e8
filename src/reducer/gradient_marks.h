#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "collectives/sample.h"

namespace lockstep {

/// What changes when somebody writes into a gradient: its version, and, because .data() has none, a sample of it. On a
/// device, where reading waits for what is queued, only the version.
inline uint64_t mark_of(const at::Tensor& gradient) {
  const auto version = static_cast<uint64_t>(gradient._version());
  return gradient.is_cpu() ? Hash::mixed(sample_of(gradient), version) : version;
}

using TensorSet = std::unordered_set<const c10::TensorImpl*>;

/// A backward pass whose gradients are in .grad; whether a GradScaler has divided them since.
struct RecordedPass {
  int number;
  bool unscaled;
};

/// What happened between a backward and the GradScaler's unscale() to gradients that have a scale.
struct GradientEdits {
  bool any = false;               ///< there are such gradients
  uint64_t cleared = 0;           ///< a hash of which were cleared
  bool cleared_here = false;      ///< some were
  bool all_cleared = false;       ///< each that a backward had given a value
  std::optional<size_t> changed;  ///< the first that has other values
  std::optional<size_t> stepped;  ///< the first parameter that has other values
  std::string changed_name, stepped_name;
};

/// What is known of the gradients of some parameters, where a reducer follows one of them.
struct KnownGradients {
  /// The ranks that have reduced them together, or will in an optimizer's step, so that all of them are at this place
  /// now. None: the gradients are this process's own, or ranks may have run out of inputs.
  std::optional<Group> ranks;
  bool contributed = false;  ///< backward passes of this rank are certain to be in them
  bool absent = false;       ///< this rank, and with virtual ranks every one, has skipped the step or is out of inputs
  int held_back = 0;         ///< passes within accumulate() whose gradients are not reduced yet
  int shares = 0;            ///< virtual ranks of this process whose backward has run, where others are still to run
  bool drops = false;        ///< NonFinitePolicy::kSkip
  bool settled = false;      ///< the optimizer has their sums already, and .grad may be gone
  std::vector<RecordedPass> passes;  ///< of this rank (PassRecord)
  GradientEdits edits;               ///< on this rank
  /// Which parameters these are: a hash that is the same on all ranks, and the name of the first.
  uint64_t identity = 0;
  std::string first_name;
  TensorSet leaves;  ///< those of autograd's graphs that the parameters are parts of, where they are none themselves
};

class ScaledPasses;

/// What a reducer tells of the parameters and gradients that it follows.
struct GradientQuestions {
  std::function<void(const TensorSet& parameters)> accept;
  /// None if it follows none of the parameters.
  std::function<std::optional<KnownGradients>(const TensorSet& parameters)> know;
  std::function<bool(const ScaledPasses& scaled)> waits;
  std::function<std::string()> stepped;
};

/// While it lives, the functions below ask it.
class AcceptingGradients {
 public:
  explicit AcceptingGradients(GradientQuestions questions);
  ~AcceptingGradients();
  AcceptingGradients(const AcceptingGradients&) = delete;
  AcceptingGradients& operator=(const AcceptingGradients&) = delete;

 private:
  friend void accept_gradients(const TensorSet& parameters);
  friend std::optional<KnownGradients> known_gradients(const TensorSet& parameters);
  friend bool scaled_gradients_wait(const ScaledPasses& scaled);
  friend std::string stepped_beside_scaler();
  const GradientQuestions questions_;
};

/// This library has changed the gradients of these parameters, on all ranks in the same way: where an optimizer sums
/// them in its step (Reducer::defer_to), that is no error.
void accept_gradients(const TensorSet& parameters);

/// What all reducers know together. None: no reducer follows one of these parameters.
std::optional<KnownGradients> known_gradients(const TensorSet& parameters);

/// Whether .grad of a parameter that a reducer follows has the present scale of the GradScaler that has `scaled`.
bool scaled_gradients_wait(const ScaledPasses& scaled);
/// The name of a parameter that a reducer follows and that was changed while its gradient had a scale
/// (PassRecord::stepped_beside); empty if there is none.
std::string stepped_beside_scaler();

}  // namespace lockstep
