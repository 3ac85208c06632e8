#include "data/image/image.h"
#include "base/error.h"

#include <algorithm>
#include <array>

#include "data/file_content.h"

namespace lockstep {

Image decode_image(const std::string& name, const uint8_t* bytes, size_t count, int64_t greatest_pixels) {
  static constexpr std::array<uint8_t, 8> kPng{0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
  static constexpr std::array<uint8_t, 3> kJpeg{0xff, 0xd8, 0xff};
  const auto starts_with = [&](const auto& magic) {
    return count >= magic.size() && std::equal(magic.begin(), magic.end(), bytes);
  };
  if (starts_with(kPng)) return decode_png(name, bytes, count, greatest_pixels);
  if (starts_with(kJpeg)) return decode_jpeg(name, bytes, count, greatest_pixels);
  throw RefusedInput(
      name + ": is neither JPEG nor PNG: expected it to start with ff d8 ff or 89 50 4e 47 0d 0a 1a 0a, found " +
      (count == 0 ? "nothing" : file_content::hex(bytes, std::min<size_t>(count, 8))));
}

void check_image_size(const std::string& name, int64_t height, int64_t width, int64_t greatest_pixels) {
  if (height < 1 || width < 1 || width > greatest_pixels / height)
    throw RefusedInput(name + ": an image of " + std::to_string(width) + " x " + std::to_string(height) +
                       " pixels, expected at least one and at most " + std::to_string(greatest_pixels));
}

}  // namespace lockstep
