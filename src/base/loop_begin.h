#pragma once

#include <functional>

namespace lockstep {

/// Calls `action` once, when the training loop begins: at the first training pass of a loader or the first backward of
/// a replica, whichever comes first. Replaces any earlier action. Null: no action.
void when_loop_begins(std::function<void()> action);

/// Called by loaders and replicas, each time.
void loop_begins();

}  // namespace lockstep
