#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <optional>

#include <lockstep/group.h>

namespace lockstep {

/// The numbers that ranks tell each other as a GradScaler unscales.
enum Said {
  // The largest of these counts.
  kInfinity,
  kGradient,
  kTrouble,
  kPresent,
  // These must be equal on all ranks that know them.
  kScale,
  kUnscales,
  kCleared,
  kOptimizer,
  kSaid
};
using ScalerWord = std::array<float, kSaid>;

inline constexpr float kNotKnown = -std::numeric_limits<float>::infinity();
/// For kScale: the scaler is not enabled.
inline constexpr float kDisabled = 0;
/// For kCleared: all gradients that a backward had given values.
inline constexpr float kAllCleared = 1;
/// A hash, as a float that holds it exactly, above kAllCleared.
inline float as_float(uint64_t hash) {
  constexpr uint64_t kExact = (uint64_t{1} << 23) - 1;
  return static_cast<float>((hash & kExact) + 2);
}

/// The combined words of all ranks.
struct ScalerWords {
  ScalerWord largest, smallest;  ///< kNotKnown: no rank knows

  bool differ(Said about) const { return largest[about] != kNotKnown && largest[about] != smallest[about]; }
};
/// Every rank of `ranks` must call it; without `ranks`, this rank is alone.
ScalerWords tell(const std::optional<Group>& ranks, const ScalerWord& own);

}  // namespace lockstep
