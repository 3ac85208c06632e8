#pragma once

namespace gloo::transport {

class Device;

/// Held only by c10d's SendWork and RecvWork; LibTorch creates and destroys it.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};

}  // namespace gloo::transport
