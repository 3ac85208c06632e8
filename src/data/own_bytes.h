#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace lockstep {

/// The bytes of `values` as a uint8 tensor of `shape`, which owns them.
inline at::Tensor own_bytes(std::vector<uint8_t> values, at::IntArrayRef shape) {
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
