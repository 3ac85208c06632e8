#pragma once

#include <deque>

#include "hosts/link_plan.h"
#include "hosts/node.h"
#include "launch/process/team.h"

namespace lockstep::hosts {

/// What an agent is told to start: the ranks of `node`, which has some, among those of all `nodes`. These are ready,
/// and have been assigned their ranks.
Start start_order(const Node& node, const std::deque<Node>& nodes, int world_size, const TeamSetup& setup, int restarts,
                  const Encryption& encryption);

}  // namespace lockstep::hosts
