#pragma once

#include <cstddef>

namespace lockstep {

/// Takes bytes, one behind the other.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  /// Throws Error naming what it writes to.
  virtual void write(const void* data, size_t size) = 0;
};

}  // namespace lockstep
