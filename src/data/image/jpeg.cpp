// libjpeg reports errors by a function that must not return. Throwing through C is undefined, so that function jumps
// back into this file, and the functions that it jumps over hold nothing that needs destroying.

#include <csetjmp>
#include <cstdio>
// These need <cstdio> first.
#include <jpeglib.h>
// This one needs their macros.
#include <jerror.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "base/text.h"
#include "data/image/image.h"

namespace lockstep {
namespace {

constexpr int kGreatestScans = 200;  // in a progressive file: each covers the whole image; encoders write ten

struct JpegDecoder {
  jpeg_decompress_struct info{};
  jpeg_error_mgr errors{};
  jpeg_progress_mgr progress{};
  std::jmp_buf back{};
  char text[JMSG_LENGTH_MAX] = "";
  size_t at = 0;  // bytes left when it failed

  ~JpegDecoder() { jpeg_destroy_decompress(&info); }
};

[[noreturn]] void fail(j_common_ptr info) {
  auto* decoder = static_cast<JpegDecoder*>(info->client_data);
  (*info->err->format_message)(info, decoder->text);
  if (decoder->info.src != nullptr) decoder->at = decoder->info.src->bytes_in_buffer;
  std::longjmp(decoder->back, 1);
}

/// If a file ends too early or is damaged in part, libjpeg warns and invents pixels; we refuse the file. Other
/// warnings, such as those about stray bytes between segments, do not affect pixels.
void note(j_common_ptr info, int level) {
  if (level < 0 && (info->err->msg_code == JWRN_JPEG_EOF || info->err->msg_code == JWRN_HIT_MARKER ||
                    info->err->msg_code == JWRN_HUFF_BAD_CODE || info->err->msg_code == JWRN_ARITH_BAD_CODE))
    fail(info);
}

void limit_scans(j_common_ptr info) {
  auto* decoder = static_cast<JpegDecoder*>(info->client_data);
  if (decoder->info.input_scan_number <= kGreatestScans) return;
  std::snprintf(decoder->text, sizeof(decoder->text), "more than %d scans", kGreatestScans);
  std::longjmp(decoder->back, 1);
}

/// Sets the size and format of the result of read_rows(). Returns false on failure; `text` then has the reason.
bool read_header(JpegDecoder& decoder, const uint8_t* bytes, size_t count, int64_t greatest_pixels) {
  jpeg_decompress_struct& info = decoder.info;
  info.err = jpeg_std_error(&decoder.errors);
  info.client_data = &decoder;
  decoder.errors.error_exit = fail;
  decoder.errors.emit_message = note;
  if (setjmp(decoder.back) != 0) return false;
  jpeg_create_decompress(&info);
  decoder.progress.progress_monitor = limit_scans;
  info.progress = &decoder.progress;
  // A progressive file's coefficients take 2 bytes for each of up to 4 components of a pixel.
  info.mem->max_memory_to_use = 8 * greatest_pixels + (16L << 20);
  jpeg_mem_src(&info, bytes, static_cast<unsigned long>(count));
  jpeg_read_header(&info, TRUE);
  const bool four = info.jpeg_color_space == JCS_CMYK || info.jpeg_color_space == JCS_YCCK;
  info.out_color_space = four ? JCS_CMYK : JCS_RGB;
  return true;
}

/// Rows with output_components bytes per pixel.
bool read_rows(JpegDecoder& decoder, uint8_t* pixels, size_t row_bytes) {
  jpeg_decompress_struct& info = decoder.info;
  if (setjmp(decoder.back) != 0) return false;
  jpeg_start_decompress(&info);
  while (info.output_scanline < info.output_height) {
    JSAMPROW row = pixels + info.output_scanline * row_bytes;
    jpeg_read_scanlines(&info, &row, 1);
  }
  jpeg_finish_decompress(&info);
  return true;
}

/// Converts cyan, magenta, yellow, black to red, green, blue, in place; Adobe's files store them inverted.
void convert_inks(std::vector<uint8_t>& pixels, bool inverted) {
  const size_t count = pixels.size() / 4;
  for (size_t i = 0; i < count; ++i) {
    const uint8_t* inks = pixels.data() + 4 * i;
    const int black = inverted ? inks[3] : 255 - inks[3];
    for (size_t ink = 0; ink < 3; ++ink) {
      const int light = inverted ? inks[ink] : 255 - inks[ink];
      pixels[3 * i + ink] = static_cast<uint8_t>((light * black + 127) / 255);
    }
  }
  pixels.resize(3 * count);
}

}  // namespace

Image decode_jpeg(const std::string& name, const uint8_t* bytes, size_t count, int64_t greatest_pixels) {
  JpegDecoder decoder;
  const auto refuse = [&] {
    throw RefusedInput(name + ": is a truncated or corrupt JPEG file: " + printable(decoder.text) + ", after " +
                       std::to_string(count - std::min(decoder.at, count)) + " of " + std::to_string(count) + " bytes");
  };
  if (!read_header(decoder, bytes, count, greatest_pixels)) refuse();
  Image image{.height = decoder.info.image_height, .width = decoder.info.image_width, .pixels = {}};
  check_image_size(name, image.height, image.width, greatest_pixels);
  const bool inks = decoder.info.out_color_space == JCS_CMYK;
  const auto row_bytes = static_cast<size_t>(image.width * (inks ? 4 : 3));
  image.pixels.resize(static_cast<size_t>(image.height) * row_bytes);
  if (!read_rows(decoder, image.pixels.data(), row_bytes)) refuse();
  if (inks) convert_inks(image.pixels, decoder.info.saw_Adobe_marker != 0);
  return image;
}

}  // namespace lockstep
