#include "collectives/hierarchical/gloo_carrier.h"

#include <ATen/ATen.h>

namespace lockstep::hierarchical_engine {

c10::intrusive_ptr<c10d::Work> GlooCarrier::send(const at::Tensor& bytes, int to, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  return engine_->send(tensors, to, tag);
}

c10::intrusive_ptr<c10d::Work> GlooCarrier::receive(const at::Tensor& bytes, int from, int tag) {
  std::vector<at::Tensor> tensors{bytes};
  return engine_->recv(tensors, from, tag);
}

void GlooCarrier::break_off(int some_peer) {
  // Gloo closes all connections of a group when one of its waits has timed out; there is no other way to request that.
  try {
    receive(at::empty({1}, at::kByte), some_peer, 0x7fffffff)->wait(std::chrono::milliseconds(1));
  } catch (const std::exception&) {
    // As intended, or they were already closed.
  }
}

}  // namespace lockstep::hierarchical_engine
