#pragma once

#include <string>

#include <lockstep/error.h>

namespace lockstep {

/// That ranks do not run the same synchronised layers. `layer`: "batch norm `bn1`"; `where`: where each rank is.
inline Error layer_error(const std::string& layer, const std::string& where) {
  return Error(layer +
               " is synchronised over all ranks, so every rank must run it: call forward on every rank (an empty batch "
               "will do), or eval() it, or do not convert it. " +
               where);
}

}  // namespace lockstep
