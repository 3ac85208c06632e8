#pragma once

#include <c10/util/Exception.h>

namespace lockstep::gloo_engine {

/// A program's tags have so many bits; six more tell a message's parts apart, by size (typed_message.h).
inline constexpr int kTagBits = 24;

inline int part_tag(int tag, int part) {
  TORCH_CHECK(tag >= 0 && tag < 1 << kTagBits, "a message's tag over Gloo is at least 0 and less than ", 1 << kTagBits,
              "; it is ", tag);
  return tag | part << kTagBits;
}

}  // namespace lockstep::gloo_engine
