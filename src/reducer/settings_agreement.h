#pragma once

#include <lockstep/group.h>

#include "reducer/reduction_events.h"

namespace lockstep {

/// Throws the same Error on all ranks if they have set their replicas differently, or have frozen different parameters.
/// Only ranks with inputs are compared (`active`: this one has them).
/// REQUIRES: every rank calls it.
void throw_different_settings(const Group& group, const ReductionEvents& events, bool active);

}  // namespace lockstep
