#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

#include "fully_sharded/unit.h"
#include "reducer/gradient_marks.h"
#include "reducer/pass_record.h"

namespace lockstep::fully_sharded {

/// Tells a GradScaler about the gradients in a model's parts: the backward passes that they come from, and whether they
/// still have its scale. With it, a scaler without a group decides together with the model's ranks.
class ScaledParts {
 public:
  ScaledParts(const Group& group, std::deque<Unit>& units);

  void backward_begins();
  /// `number`: see current_backward().
  void backward_ended(int number);
  /// The reason why `call` cannot use the gradients; empty if they have no scale.
  std::string trouble_before(const std::string& call) const;

 private:
  std::optional<KnownGradients> known(const TensorSet& parameters) const;

  const Group group_;
  std::vector<at::Tensor> parts_;
  std::vector<const c10::TensorImpl*> leaves_;  ///< the module's tensors
  std::vector<std::string> names_;
  PassRecord record_;
  const AcceptingGradients accepting_;  // last, because others query it from then on
};

}  // namespace lockstep::fully_sharded
