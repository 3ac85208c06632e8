#pragma once

#include <vector>

#include "support/ranks.h"

namespace lockstep::testing {

/// What the conformance suite runs on: the engines that this binary can start ranks for.
const std::vector<Engine>& engines();

}  // namespace lockstep::testing
