// Reads IDX files strictly: for any bytes, the result is either the array that the header announces or an Error. Memory
// is bounded by the size of the file (times 1032, the most that deflate can expand).
//
// file_content.h provides the content, of a plain file or from a gzip stream; parse() is the same for both.

#include "data/idx_file.h"
#include "base/error.h"

#include <algorithm>
#include <array>
#include <limits>
#include <string>

#include "data/file_content.h"

namespace lockstep {
namespace {

constexpr uint8_t kUnsignedBytes = 8;
constexpr size_t kIdxChunkBytes = 1 << 18;

using file_content::fail;
using file_content::GzipFile;
using file_content::hex;
using file_content::PlainFile;

std::string describe(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text;
}

std::vector<int64_t> read_shape(const std::filesystem::path& path, auto& source, const std::vector<int64_t>& expected) {
  std::array<uint8_t, 4> magic;
  const size_t got = source.read(magic.data(), magic.size());
  const std::array<uint8_t, 4> wanted{0, 0, kUnsignedBytes, static_cast<uint8_t>(expected.size())};
  const auto fail_without_header = [&](size_t found) {
    fail(path, "is truncated: expected a header of " + std::to_string(4 + 4 * expected.size()) + " bytes, found " +
                   std::to_string(found) + " bytes");
  };
  if (got != magic.size()) fail_without_header(got);
  if (magic != wanted) {
    const bool is_gzip = magic[0] == 0x1f && magic[1] == 0x8b;
    fail(path, "is not an IDX file of bytes in " + std::to_string(expected.size()) + " dimensions: it starts with " +
                   hex(magic.data(), 4) + ", expected " + hex(wanted.data(), 4) +
                   (is_gzip ? "; this is gzip, so its name must end in .gz" : ""));
  }
  std::vector<int64_t> shape;
  for (size_t i = 0; i < expected.size(); ++i) {
    std::array<uint8_t, 4> size;
    const size_t found = source.read(size.data(), size.size());
    if (found != size.size()) fail_without_header(4 + 4 * i + found);
    shape.push_back(int64_t{size[0]} << 24 | int64_t{size[1]} << 16 | int64_t{size[2]} << 8 | int64_t{size[3]});
  }
  for (size_t i = 0; i < expected.size(); ++i)
    if (expected[i] != 0 && expected[i] != shape[i])
      fail(path, "has the wrong shape: expected " + describe(expected) + " (0: any), found " + describe(shape));
  return shape;
}

/// The product of `shape`, or the largest representable number if that is smaller.
int64_t element_count(const std::vector<int64_t>& shape) {
  int64_t count = 1;
  bool too_many = false;
  for (int64_t size : shape) too_many |= __builtin_mul_overflow(count, size, &count);
  const bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
  return empty ? 0 : too_many ? std::numeric_limits<int64_t>::max() : count;
}

int64_t count_rest(auto& source) {
  std::vector<uint8_t> scratch(kIdxChunkBytes);
  int64_t count = 0;
  while (const size_t got = source.read(scratch.data(), scratch.size())) count += got;
  return count;
}

IdxFile parse(const std::filesystem::path& path, auto source, const std::vector<int64_t>& expected) {
  IdxFile idx{.shape = read_shape(path, source, expected), .bytes = {}};
  const int64_t header_bytes = 4 + 4 * static_cast<int64_t>(idx.shape.size());
  const int64_t count = element_count(idx.shape);
  const auto fail_at = [&](const char* how, const std::string& found) {
    fail(path, std::string(how) + ": " + describe(idx.shape) + " elements and a header of " +
                   std::to_string(header_bytes) + " bytes expected, found " + found);
  };
  if (count > source.greatest_content_bytes() - header_bytes)
    fail_at("is truncated", "a file of " + std::to_string(source.file_bytes()) + " bytes");
  idx.bytes.resize(count);
  const int64_t found = source.read(idx.bytes.data(), idx.bytes.size());
  if (found < count) fail_at("is truncated", std::to_string(header_bytes + found) + " bytes of content");
  if (const int64_t rest = count_rest(source); rest > 0)
    fail_at("is too long", std::to_string(header_bytes + count + rest) + " bytes of content");
  if (source.cut_short())
    fail(path, "is truncated: expected the end of the gzip stream, found the end of the file after " +
                   std::to_string(source.file_bytes()) + " bytes");
  return idx;
}

}  // namespace

IdxFile read_idx(const std::filesystem::path& path, const std::vector<int64_t>& shape) {
  return path.extension() == ".gz" ? parse(path, GzipFile(path), shape) : parse(path, PlainFile(path), shape);
}

std::filesystem::path find_idx(const std::filesystem::path& folder, const std::string& name,
                               const std::string& remedy) {
  std::error_code ignored;
  if (!std::filesystem::is_directory(folder, ignored))
    throw RefusedInput("data folder '" + folder.string() + "' does not exist. " + remedy);
  for (const auto& path : {folder / name, folder / (name + ".gz")})
    if (std::filesystem::exists(path, ignored)) return path;
  throw RefusedInput("data folder '" + folder.string() + "' contains neither " + name + " nor " + name + ".gz. " +
                     remedy);
}

}  // namespace lockstep
