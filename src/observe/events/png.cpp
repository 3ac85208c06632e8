#include "observe/events/png.h"

#include <lockstep/error.h>
#include <zlib.h>

#include <string_view>

namespace lockstep {
namespace {

void append_big_endian(std::string& out, uint32_t value) {
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(value >> shift & 0xff);
}

const Bytef* bytes_of(std::string_view text) { return reinterpret_cast<const Bytef*>(text.data()); }

void append_chunk(std::string& out, std::string_view type, std::string_view data) {
  append_big_endian(out, static_cast<uint32_t>(data.size()));
  const size_t start = out.size();
  out += type;
  out += data;
  const std::string_view summed = std::string_view(out).substr(start);
  append_big_endian(out, static_cast<uint32_t>(::crc32(0, bytes_of(summed), static_cast<uInt>(summed.size()))));
}

/// Each row follows a byte that names its filter: 2, "up", the difference from the row above, if there is one.
std::string filtered_rows(const Picture& picture) {
  const size_t row_bytes = static_cast<size_t>(picture.width) * picture.channels;
  std::string rows;
  rows.reserve((row_bytes + 1) * picture.height);
  for (size_t y = 0; y < picture.height; ++y) {
    const char* row = picture.pixels.data() + y * row_bytes;
    rows += static_cast<char>(y == 0 ? 0 : 2);
    for (size_t i = 0; i < row_bytes; ++i) rows += y == 0 ? row[i] : static_cast<char>(row[i] - row[i - row_bytes]);
  }
  return rows;
}

}  // namespace

std::string encode_png(const Picture& picture) {
  constexpr char kColourTypes[] = {0, 4, 2, 6};  // by channels
  const std::string rows = filtered_rows(picture);
  uLongf size = ::compressBound(rows.size());
  std::string compressed(size, '\0');
  if (::compress2(reinterpret_cast<Bytef*>(compressed.data()), &size, bytes_of(rows), rows.size(), 6) != Z_OK)
    throw Error("a picture of " + std::to_string(picture.width) + " x " + std::to_string(picture.height) +
                " pixels could not be compressed");
  compressed.resize(size);
  std::string header;
  append_big_endian(header, picture.width);
  append_big_endian(header, picture.height);
  header += '\x08';  // bits
  header += kColourTypes[picture.channels - 1];
  header += std::string(3, '\0');  // compression, filter and interlace methods
  std::string file = "\x89PNG\r\n\x1a\n";
  append_chunk(file, "IHDR", header);
  append_chunk(file, "IDAT", compressed);
  append_chunk(file, "IEND", "");
  return file;
}

}  // namespace lockstep
