// libFuzzer: any bytes as a JPEG or PNG file, to the last pixel, and resized.

#include <lockstep/error.h>

#include "data/image/image.h"
#include "data/resize.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lockstep;
  try {
    constexpr int64_t kGreatest = 1 << 18;
    const Image image = decode_image("fuzz", data, size, kGreatest);
    if (image.height * image.width > kGreatest ||
        static_cast<int64_t>(image.pixels.size()) != 3 * image.height * image.width)
      __builtin_trap();
    uint8_t small[5 * 7];
    resize(Plane<const uint8_t>{image.pixels.data(), image.height, image.width, 3 * image.width, 3},
           {0, 0, static_cast<double>(image.height), static_cast<double>(image.width)}, Plane<uint8_t>{small, 5, 7, 7});
  } catch (const Error&) {
  }
  return 0;
}
