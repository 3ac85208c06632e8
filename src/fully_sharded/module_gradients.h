#pragma once

#include <deque>
#include <string>

#include "fully_sharded/unit.h"

// The gradients that a rank holds are in the parts' .grad. So that nobody takes the module's own .grad for nothing to
// clear or to limit, a parameter whose part has a gradient has a closed tensor there: of its shape, without memory,
// which throws when it is read or written. During a backward there is none, since autograd would add to it.
//
// Removing it, as the module's zero_grad() does, removes the part's gradient; and the other way round.

namespace lockstep::fully_sharded {

/// What was removed on one side since show_gradients() is removed on the other. Returns what is wrong: a .grad that
/// somebody else has set.
std::string settle_gradients(std::deque<Unit>& units);
/// The parameters have no closed tensors.
void hide_gradients(std::deque<Unit>& units);
/// Those whose parts have a gradient have one.
void show_gradients(std::deque<Unit>& units);

}  // namespace lockstep::fully_sharded
