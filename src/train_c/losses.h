#pragma once

#include "train_c/recipe.h"

namespace lockstep::train_c {

/// Sets the loss, and what belongs to it, from the entry `loss`. Throws LOCKSTEP_INVALID_ARGUMENT.
void choose_loss(Settings& settings, Recipe& recipe);

}  // namespace lockstep::train_c
