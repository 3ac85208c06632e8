#pragma once

#include <cstddef>

namespace lockstep {

/// A destination for a stream of bytes.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  /// Appends the bytes. Throws Error naming the destination.
  virtual void write(const void* data, size_t size) = 0;
};

}  // namespace lockstep
