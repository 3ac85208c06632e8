#pragma once

namespace lockstep {

/// What becomes of a step in which a gradient of some rank holds infinity or NaN. All ranks do the same.
enum class NonFinitePolicy {
  kIgnore,  ///< nothing is looked at: the mean is not finite either
  kSkip,    ///< every .grad becomes undefined on all ranks, so that optimizer.step() changes nothing; it is counted
  kRaise,   ///< backward throws an Error on all ranks that names rank and parameter
};

}  // namespace lockstep
