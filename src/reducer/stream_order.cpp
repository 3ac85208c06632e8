#include "reducer/stream_order.h"

#include <algorithm>
#include <utility>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace lockstep {

void StreamOrder::note(c10::Device device) {
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

void StreamOrder::follow() {
  for (const c10::Stream& stream : std::exchange(streams_, {})) {
    const c10::Stream here = c10::impl::VirtualGuardImpl(stream.device_type()).getStream(stream.device());
    if (here == stream) continue;
    c10::Event event(stream.device_type());
    event.record(stream);
    event.block(here);
  }
}

}  // namespace lockstep
