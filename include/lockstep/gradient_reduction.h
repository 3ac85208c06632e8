#pragma once

#include <lockstep/cxx20.h>

namespace lockstep {

/// The result of reducing the ranks' gradients g_r.
enum class GradientReduction {
  kMean,          ///< sum of g_r / world size
  kSum,           ///< sum of g_r
  kWeightedMean,  ///< sum of w_r * g_r / sum of w_r, with each rank's set_weight()
};

}  // namespace lockstep
