#pragma once

#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace lockstep {

/// Several threads of a backward, each with a current stream of its own, may fill one bucket on a device; and another
/// of them, of another device, may be the one that launches it. What is launched must come after all of it.
class StreamOrder {
 public:
  /// Something has been started on the device's current stream.
  void note(c10::Device device);
  /// What the current streams hold from here on comes after all that was noted, which is forgotten.
  void follow();
  void forget() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;  ///< each once
};

}  // namespace lockstep
