#pragma once

#include <cstdint>
#include <string>

namespace lockstep {

/// Pixels of 8 bits per channel, row by row, with the channels of a pixel side by side: 1 gray, 2 gray and alpha, 3
/// RGB, 4 RGBA.
struct Picture {
  uint32_t width = 0, height = 0;
  uint32_t channels = 0;
  std::string pixels;  ///< width * height * channels bytes
};

/// A PNG file (ISO/IEC 15948) without interlacing. The picture has at least one pixel. Throws Error if zlib fails.
std::string encode_png(const Picture& picture);

}  // namespace lockstep
