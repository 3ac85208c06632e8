#pragma once

#include <string>

#include <lockstep/group.h>

#include "reducer/gradient_marks.h"
#include "reducer/scaled_passes.h"

namespace lockstep {

// Misuse of a GradScaler on a rank, as predicates; empty if none.

/// The gradients of an optimizer were divided as another's that has the same parameters.
inline constexpr const char* kDividedTwice =
    "gave unscale() or step() an optimizer that has parameters of another one, whose gradients the scaler had already "
    "divided, so they would be divided twice; call unscale() and step() with the same optimizer, and give each "
    "parameter to one optimizer";
/// A backward has added to gradients that a step() had used, of parameters that no reducer follows.
inline constexpr const char* kAddedToUsed =
    "added gradients to those that a step had used, which were already divided by the scale; call zero_grad() before "
    "the first backward of each step";
/// The gradients that unscale() divided are missing in step().
inline constexpr const char* kClearedAfter =
    "cleared the gradients of the optimizer between unscale() and step(), as zero_grad() does, so it would not step as "
    "the other ranks do; call zero_grad() before backward(), or after step()";
/// The gradients became infinite after unscale() on a rank that decides alone.
inline constexpr const char* kInfiniteAfter =
    "has infinity or NaN in gradients that were finite when unscale() looked for it, as an average with those of "
    "another rank has; give the scaler the group of the ranks, so that they decide together, or average the gradients "
    "before unscale()";
/// Trouble before `call`, unscale() or step(), with gradients that a reducer follows.
std::string trouble_of_gradients(const char* call, const TensorSet& parameters, const KnownGradients& known,
                                 const ScaledPasses& scaled);
/// Between unscale() and step(), scaled passes have added to divided gradients. `passes` is their number; 0: some.
std::string trouble_of_later_passes(size_t passes);
/// `call` has changed the scale while gradients have the old one.
std::string trouble_of_new_scale(const std::string& call);
/// Errors of passes when the scale was `present`.
std::string trouble_of(const ScaledPasses::Wrong& wrong, float present);
/// `parameter` was stepped by its optimizer.
std::string trouble_of_step_beside(const std::string& parameter);

}  // namespace lockstep
