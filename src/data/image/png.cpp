// libpng reports errors as libjpeg does (jpeg.cpp): by a jump over functions that hold nothing that needs destroying.

#include <png.h>

#include <csetjmp>
#include <cstdio>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/text.h"
#include "data/image/image.h"

namespace lockstep {
namespace {

struct PngDecoder {
  const uint8_t* bytes;
  size_t count;
  size_t at = 0;
  png_structp png = nullptr;
  png_infop info = nullptr;
  std::jmp_buf back{};
  char text[160] = "";

  ~PngDecoder() { png_destroy_read_struct(&png, &info, nullptr); }
};

[[noreturn]] void fail(png_structp png, png_const_charp why) {
  auto* decoder = static_cast<PngDecoder*>(png_get_error_ptr(png));
  std::snprintf(decoder->text, sizeof(decoder->text), "%s", why);
  std::longjmp(decoder->back, 1);
}

void ignore(png_structp, png_const_charp) {}

void give(png_structp png, png_bytep to, size_t count) {
  auto* decoder = static_cast<PngDecoder*>(png_get_io_ptr(png));
  if (count > decoder->count - decoder->at) png_error(png, "the file ends too early");
  std::memcpy(to, decoder->bytes + decoder->at, count);
  decoder->at += count;
}

/// Returns false on failure; `text` then has the reason.
bool read_header(PngDecoder& decoder, int64_t greatest_pixels) {
  if (setjmp(decoder.back) != 0) return false;
  decoder.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &decoder, fail, ignore);
  if (decoder.png == nullptr) return false;
  decoder.info = png_create_info_struct(decoder.png);
  if (decoder.info == nullptr) return false;
  png_set_read_fn(decoder.png, &decoder, give);
  const auto side = static_cast<png_uint_32>(greatest_pixels < PNG_UINT_31_MAX ? greatest_pixels : PNG_UINT_31_MAX);
  png_set_user_limits(decoder.png, side, side);
  png_set_chunk_cache_max(decoder.png, 64);
  png_set_chunk_malloc_max(decoder.png, 4 << 20);
  png_read_info(decoder.png, decoder.info);
  return true;
}

/// Rows with 3 bytes per pixel.
bool read_rows(PngDecoder& decoder, png_bytepp rows, size_t row_bytes) {
  if (setjmp(decoder.back) != 0) return false;
  png_structp png = decoder.png;
  png_set_strip_16(png);
  if (png_get_color_type(png, decoder.info) == PNG_COLOR_TYPE_PALETTE) png_set_palette_to_rgb(png);
  if ((png_get_color_type(png, decoder.info) & PNG_COLOR_MASK_COLOR) == 0) {
    png_set_expand_gray_1_2_4_to_8(png);
    png_set_gray_to_rgb(png);
  }
  png_set_strip_alpha(png);
  png_set_interlace_handling(png);
  png_read_update_info(png, decoder.info);
  if (png_get_rowbytes(png, decoder.info) != row_bytes) png_error(png, "rows of an unexpected size");
  png_read_image(png, rows);
  png_read_end(png, nullptr);
  return true;
}

}  // namespace

Image decode_png(const std::string& name, const uint8_t* bytes, size_t count, int64_t greatest_pixels) {
  PngDecoder decoder{.bytes = bytes, .count = count};
  const auto refuse = [&] {
    throw RefusedInput(name + ": is a truncated or corrupt PNG file: " + printable(decoder.text) + ", after " +
                       std::to_string(decoder.at) + " of " + std::to_string(count) + " bytes");
  };
  if (!read_header(decoder, greatest_pixels)) refuse();
  Image image{.height = png_get_image_height(decoder.png, decoder.info),
              .width = png_get_image_width(decoder.png, decoder.info),
              .pixels = {}};
  check_image_size(name, image.height, image.width, greatest_pixels);
  const auto row_bytes = static_cast<size_t>(image.width * 3);
  image.pixels.resize(static_cast<size_t>(image.height) * row_bytes);
  std::vector<png_bytep> rows(static_cast<size_t>(image.height));
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = image.pixels.data() + i * row_bytes;
  if (!read_rows(decoder, rows.data(), row_bytes)) refuse();
  return image;
}

}  // namespace lockstep
