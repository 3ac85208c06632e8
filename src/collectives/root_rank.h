#pragma once

#include <cstdint>

#include <c10/util/Exception.h>

namespace lockstep {

/// c10d gives roots in 64 bits, and nobody has compared them with the number of ranks.
inline int root_rank(const char* call, int64_t root, int size) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, call, ": a group of ", size, " ranks has no such root: ", root);
  return static_cast<int>(root);
}

}  // namespace lockstep
