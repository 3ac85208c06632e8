#include "checkpoint/forgotten_parts.h"

#include <algorithm>
#include <string>

#include <c10/util/Exception.h>

#include "base/state_in_use.h"

namespace lockstep {
namespace {

void warn(const std::string& what, const std::string& line) {
  TORCH_WARN("Checkpointer: no part keeps the state of ", what,
             ", so a resumed run would begin it anew, and its results would differ from those of a run without a stop. "
             "Add it before resume(): ",
             line);
}

/// A module is kept with the one that it belongs to.
bool is_in_a_module(const void* object, const std::vector<CheckpointPart>& parts) {
  return std::any_of(parts.begin(), parts.end(), [&](const CheckpointPart& part) {
    if (part.module == nullptr) return false;
    const auto inner = part.module->modules(/*include_self=*/false);
    return part.module == object ||
           std::any_of(inner.begin(), inner.end(), [&](const auto& one) { return one.get() == object; });
  });
}

}  // namespace

void warn_of_forgotten_parts(const std::vector<CheckpointPart>& parts) {
  for (const StateInUse& state : forgotten_states()) {
    note_kept(state.object);  // or the user knows now
    if (!is_in_a_module(state.object, parts)) warn(state.name, state.line);
  }
  const bool has_model = std::any_of(parts.begin(), parts.end(), [](const CheckpointPart& part) {
    return part.module != nullptr || part.save_in_slices != nullptr;
  });
  if (!has_model || !optimizer_is_unknown()) return;
  note_optimizer_kept(nullptr);
  warn("an optimizer (its momentum, moments and learning rate) for the model that is trained",
       "checkpointer.add(\"optimizer\", optimizer)");
}

}  // namespace lockstep
