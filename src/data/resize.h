#pragma once

#include <cstdint>

namespace lockstep {

/// A part of a plane, in pixels: fractions allowed.
struct Box {
  double top, left, height, width;
};

/// One plane of an image: rows of `width` values, `stride` values apart, each value `step` values from the next.
template <typename T>
struct Plane {
  T* values;
  int64_t height, width;
  int64_t stride;
  int64_t step = 1;
};

/// Sets `to` to the part `box` of `from`, resized by a triangle filter that is as wide as the pixels of `to` when it
/// shrinks: antialiased bilinear, like PIL's BILINEAR. First along rows, then along columns, in float32; bytes are
/// rounded once, at the end. `box` must lie in `from`; sizes must be at least 1.
void resize(const Plane<const uint8_t>& from, const Box& box, const Plane<uint8_t>& to);
void resize(const Plane<const float>& from, const Box& box, const Plane<float>& to);

}  // namespace lockstep
