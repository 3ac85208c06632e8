#pragma once

#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace lockstep {

/// Orders the sending of a bucket on a device after everything that filled it. Several threads of a backward, each with
/// its own current stream, may fill one bucket, and another device's thread may send it.
class StreamOrder {
 public:
  /// Work has been queued on the device's current stream.
  void note(c10::Device device);
  /// Makes the current streams wait for all noted work, and forgets it.
  void follow();
  void forget() { streams_.clear(); }

 private:
  std::vector<c10::Stream> streams_;  ///< each once
};

}  // namespace lockstep
