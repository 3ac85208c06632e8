#pragma once

namespace gloo::transport {

class Device;

/// Held by c10d's SendWork and RecvWork only; LibTorch creates and destroys it.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace gloo::transport
