#pragma once

#include <functional>

namespace lockstep {

/// Calls `action` once, when the training loop begins: at the first training pass of a loader or the first backward
/// that a replica sees, whichever comes first. Takes the place of an earlier action. Null: nothing is to be done.
void when_loop_begins(std::function<void()> action);

/// Said by loaders and replicas, each time.
void loop_begins();

}  // namespace lockstep
