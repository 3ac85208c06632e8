#pragma once

#include <algorithm>
#include <cstddef>

namespace lockstep::hierarchical_engine {

/// A smaller slice is not worth another pair of messages.
constexpr size_t kSliceBytes = 16 << 10;
/// Large enough to keep a connection busy, and small enough that adding one piece and sending another overlap.
constexpr size_t kPieceBytes = 256 << 10;
/// Up to this size, one exchange of everything beats two of parts.
constexpr size_t kAtOnceBytes = 32 << 10;

/// The number of slices into which an operand is cut, each served by its own rail.
inline size_t slices_of(size_t bytes, int rails) {
  return std::clamp<size_t>(bytes / kSliceBytes, 1, static_cast<size_t>(rails));
}

}  // namespace lockstep::hierarchical_engine
