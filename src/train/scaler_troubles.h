#pragma once

#include <string>

#include <lockstep/group.h>

#include "reducer/gradient_marks.h"
#include "reducer/scaled_passes.h"

namespace lockstep {

// What a rank has done wrong with a GradScaler, as predicates; empty if nothing.

/// The gradients of an optimizer were divided as those of another one that has the same parameters.
inline constexpr const char* kDividedTwice =
    "gave unscale() or step() an optimizer that has parameters of another one, whose gradients the scaler had divided "
    "already, so they would be divided twice; call unscale() and step() with the same optimizer, and give each "
    "parameter to one optimizer";
/// A backward has added to gradients that a step() had used, of parameters that no reducer follows.
inline constexpr const char* kAddedToUsed =
    "added gradients to those that a step had used, which were divided by the scale already; call zero_grad() before "
    "the first backward of each step";
/// The gradients that unscale() had divided are not there in step().
inline constexpr const char* kClearedAfter =
    "cleared the gradients of the optimizer between unscale() and step(), as zero_grad() does, so it would not step as "
    "the other ranks do; call zero_grad() before backward(), or after step()";
/// So they became after unscale() on a rank that decides alone.
inline constexpr const char* kInfiniteAfter =
    "has infinity or NaN in gradients that were finite when unscale() looked for it, as an average with those of "
    "another rank has; give the scaler the group of the ranks, so that they decide together, or average the gradients "
    "before unscale()";
/// Before `call`, unscale() or step(), with gradients that a reducer follows.
std::string trouble_of_gradients(const char* call, const TensorSet& parameters, const KnownGradients& known,
                                 const ScaledPasses& scaled);
/// Between unscale() and step(): scaled passes have added to what was divided. `passes`: how many; 0: some.
std::string trouble_of_later_passes(size_t passes);
/// `call` has changed the scale while gradients have the one before.
std::string trouble_of_new_scale(const std::string& call);
/// What was wrong with passes, where the scale was `present`.
std::string trouble_of(const ScaledPasses::Wrong& wrong, float present);
/// `parameter` was stepped by its optimizer.
std::string trouble_of_step_beside(const std::string& parameter);

}  // namespace lockstep
