#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct Image {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> pixels;  ///< [height, width, 3]: red, green, blue
};

/// The largest number of pixels in an image.
inline constexpr int64_t kGreatestImage = int64_t{1} << 26;

/// Reads a JPEG or PNG file from memory; the first bytes, not the name, decide the format. Memory for pixels is
/// allocated only after their number has been checked. Throws Error that begins with `name` and gives the error and its
/// byte.
Image decode_image(const std::string& name, const uint8_t* bytes, size_t count,
                   int64_t greatest_pixels = kGreatestImage);

/// decode_image() for one format.
Image decode_jpeg(const std::string& name, const uint8_t* bytes, size_t count, int64_t greatest_pixels);
Image decode_png(const std::string& name, const uint8_t* bytes, size_t count, int64_t greatest_pixels);

/// Throws Error if an image has no pixels, or more than `greatest`.
void check_image_size(const std::string& name, int64_t height, int64_t width, int64_t greatest_pixels);

}  // namespace lockstep
