#pragma once

#include <deque>
#include <string>

#include "checkpoint/memory/kept_state.h"
#include "hosts/node.h"

namespace lockstep::hosts {

/// The state in words; empty if there was nothing to keep.
std::string describe(const KeptState& kept);

/// Makes the agents write the states in their machines' memory, one after the other, so that agents with a common file
/// system write it once. Each machine has a whole copy of the state, perhaps of another step: the newest counts.
KeptState keep_states(std::deque<Node>& nodes, const std::string& other_folder, bool is_sound);

}  // namespace lockstep::hosts
