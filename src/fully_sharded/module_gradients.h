#pragma once

#include <deque>
#include <string>

#include "fully_sharded/unit.h"

// A rank's gradients are in the parts' .grad. A parameter whose part has a gradient has a closed tensor as its own
// .grad, so that code does not conclude that there is nothing to clear or to limit. A closed tensor has the parameter's
// shape but no memory, and throws when it is read or written. During a backward there are none, since autograd would
// add to them.
//
// Removing a closed tensor, as the module's zero_grad() does, removes the part's gradient, and vice versa.

namespace lockstep::fully_sharded {

/// Removes on each side the gradients that were removed on the other since show_gradients(). Returns an error if other
/// code has set a .grad.
std::string settle_gradients(std::deque<Unit>& units);
/// Removes the parameters' closed tensors.
void hide_gradients(std::deque<Unit>& units);
/// Gives a closed tensor to each parameter whose part has a gradient.
void show_gradients(std::deque<Unit>& units);

}  // namespace lockstep::fully_sharded
