#include "data/own_bytes.h"

#include <ATen/ATen.h>

namespace lockstep {

at::Tensor own_bytes(std::vector<uint8_t> values, at::IntArrayRef shape) {
  auto* kept = new std::vector<uint8_t>(std::move(values));
  // An empty vector may have no address, which from_blob would refuse.
  if (kept->empty()) {
    delete kept;
    return at::empty(shape, at::kByte);
  }
  return at::from_blob(
      kept->data(), shape, [kept](void*) { delete kept; }, at::kByte);
}

}  // namespace lockstep
