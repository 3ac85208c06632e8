#pragma once

#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace lockstep {

/// Several threads of a backward, each with its own current stream, may fill one bucket on a device, and the thread of
/// another device may send it. The sending must come after everything that filled it.
class StreamOrder {
 public:
  /// Work has been queued on the device's current stream.
  void note(c10::Device device);
  /// From here on, the current streams wait for all work that was noted. Forgets what was noted.
  void follow();
  void forget() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;  ///< each once
};

}  // namespace lockstep
