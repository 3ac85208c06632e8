#pragma once

#include <lockstep/cxx20.h>

namespace lockstep {

/// How a step is treated if a gradient of any rank contains infinity or NaN. All ranks do the same.
enum class NonFinitePolicy {
  kIgnore,  ///< no check: the mean is not finite either
  kSkip,    ///< every .grad becomes undefined on all ranks: optimizer.step() changes nothing; the step is counted
  kRaise,   ///< backward throws an Error on all ranks, which names rank and parameter
};

}  // namespace lockstep
