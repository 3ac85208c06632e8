#pragma once

#include "launch/plan.h"

namespace lockstep::hosts {

/// The environment of a machine's ranks: the coordinator's, but for variables that say something about one machine, or
/// one login, alone, which are those of the machine's agent.
EnvironmentBlock environment_here(const EnvironmentBlock& coordinators, const EnvironmentBlock& own);

}  // namespace lockstep::hosts
