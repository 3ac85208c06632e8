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

/// A mark that changes when other code writes into a gradient: its version and, because .data() has none, a sample of
/// it. On a device, where reading waits for queued work, only the version.
inline uint64_t mark_of(const at::Tensor& gradient) {
  const auto version = static_cast<uint64_t>(gradient._version());
  return gradient.is_cpu() ? Hash::mixed(sample_of(gradient), version) : version;
}

using TensorSet = std::unordered_set<const c10::TensorImpl*>;

/// A backward pass whose gradients are in .grad, and whether a GradScaler has divided them since.
struct RecordedPass {
  int number;
  bool unscaled;
};

/// Changes to scaled gradients between a backward and the GradScaler's unscale().
struct GradientEdits {
  bool any = false;               ///< there are scaled gradients
  uint64_t cleared = 0;           ///< a hash of the cleared ones
  bool cleared_here = false;      ///< some were cleared on this rank
  bool all_cleared = false;       ///< all that a backward had given a value were cleared
  std::optional<size_t> changed;  ///< the first with other values
  std::optional<size_t> stepped;  ///< the first parameter with other values
  std::string changed_name, stepped_name;
};

/// The facts that a reducer that follows some of these parameters knows about their gradients.
struct KnownGradients {
  /// The ranks that have reduced them together, or will in an optimizer's step, so that all of them are at this place
  /// now. None: the gradients are this process's own, or ranks may have run out of inputs.
  std::optional<Group> ranks;
  bool contributed = false;  ///< they certainly include backward passes of this rank
  bool absent = false;       ///< this rank, and with virtual ranks every one, has skipped the step or is out of inputs
  int held_back = 0;         ///< passes within accumulate() whose gradients are not reduced yet
  int shares = 0;            ///< virtual ranks of this process whose backward has run, if others have yet to
  bool drops = false;        ///< NonFinitePolicy::kSkip
  bool settled = false;      ///< the optimizer already has their sums, and .grad may be gone
  std::vector<RecordedPass> passes;  ///< of this rank (PassRecord)
  GradientEdits edits;               ///< on this rank
  /// Identifies these parameters: a hash that is the same on all ranks, and the name of the first.
  uint64_t identity = 0;
  std::string first_name;
  TensorSet leaves;  ///< of autograd's graphs, for parameters that are parts of leaves and not leaves themselves
};

class ScaledPasses;

/// A reducer's answers about the parameters and gradients that it follows.
struct GradientQuestions {
  std::function<void(const TensorSet& parameters)> accept;
  /// None if it follows none of the parameters.
  std::function<std::optional<KnownGradients>(const TensorSet& parameters)> know;
  std::function<bool(const TensorSet& parameters)> changed;
  std::function<bool(const ScaledPasses& scaled)> waits;
  std::function<std::string()> stepped;
};

/// While it lives, the functions below query it.
class AcceptingGradients {
 public:
  explicit AcceptingGradients(GradientQuestions questions);
  ~AcceptingGradients();
  AcceptingGradients(const AcceptingGradients&) = delete;
  AcceptingGradients& operator=(const AcceptingGradients&) = delete;

 private:
  friend void accept_gradients(const TensorSet& parameters);
  friend std::optional<KnownGradients> known_gradients(const TensorSet& parameters);
  friend bool gradients_were_changed(const TensorSet& parameters);
  friend bool scaled_gradients_wait(const ScaledPasses& scaled);
  friend std::string stepped_beside_scaler();
  const GradientQuestions questions_;
};

/// Tells that this library has changed the gradients of these parameters, on all ranks in the same way, which is not an
/// error if an optimizer sums them in its step (Reducer::defer_to).
void accept_gradients(const TensorSet& parameters);

/// The combined knowledge of all reducers. None: no reducer follows one of these parameters.
std::optional<KnownGradients> known_gradients(const TensorSet& parameters);

/// Whether other code has changed this rank's gradients of these parameters since backward, while an optimizer is to
/// sum them in its step.
bool gradients_were_changed(const TensorSet& parameters);

/// Whether .grad of a parameter that a reducer follows has the present scale of the GradScaler that has `scaled`.
bool scaled_gradients_wait(const ScaledPasses& scaled);
/// The name of a parameter that a reducer follows and that was changed while its gradient was scaled
/// (PassRecord::stepped_beside); empty if none.
std::string stepped_beside_scaler();

}  // namespace lockstep
