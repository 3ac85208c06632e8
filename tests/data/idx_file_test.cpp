#include "data/idx_file.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <lockstep/error.h>

#include <numeric>

#include "data/idx_writer.h"

namespace lockstep {
namespace {

std::string ramp(size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i * 7 % 251);
  return text;
}

/// Expects that reading fails with a text that names the file and holds each of `parts`.
void expect_failure(const std::filesystem::path& path, const std::vector<int64_t>& shape,
                    std::initializer_list<std::string> parts) {
  const std::string text = failure_of<Error>([&] { read_idx(path, shape); });
  EXPECT_NE(text.find(path.string()), std::string::npos) << "names no file: " << text;
  for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

class IdxFileTest : public ::testing::Test {
 protected:
  const TemporaryFolder folder_;
  const std::string content_ = idx_header({3, 4, 5}) + ramp(60);
};

TEST_F(IdxFileTest, ReadsPlainAndGzip) {
  for (const auto& path : {folder_.write("plain", content_), folder_.write("packed.gz", gzip(content_))}) {
    const IdxFile idx = read_idx(path, {0, 4, 5});
    EXPECT_EQ(idx.shape, (std::vector<int64_t>{3, 4, 5}));
    EXPECT_EQ(std::string(idx.bytes.begin(), idx.bytes.end()), ramp(60));
  }
}

TEST_F(IdxFileTest, ReadsAFileOfManyChunks) {
  const std::string content = idx_header({1000, 1000}) + ramp(1000000);
  const IdxFile idx = read_idx(folder_.write("big.gz", gzip(content)), {0, 0});
  EXPECT_EQ(std::string(idx.bytes.begin(), idx.bytes.end()), ramp(1000000));
}

TEST_F(IdxFileTest, ReadsAnEmptyArray) {
  EXPECT_TRUE(read_idx(folder_.write("none", idx_header({0, 28, 28})), {0, 28, 28}).bytes.empty());
}

TEST_F(IdxFileTest, EveryTruncationOfAPlainFileFails) {
  for (size_t length = 0; length < content_.size(); ++length)
    expect_failure(
        folder_.write("short", content_.substr(0, length)), {0, 4, 5},
        {"truncated", length < 16 ? "header of 16 bytes" : "3 x 4 x 5 elements", std::to_string(length) + " bytes"});
}

TEST_F(IdxFileTest, EveryTruncationOfAGzipFileFails) {
  const std::string packed = gzip(content_);
  for (size_t length = 0; length < packed.size(); ++length)
    expect_failure(folder_.write("short.gz", packed.substr(0, length)), {0, 4, 5},
                   {length < 2 ? "not a gzip file" : "truncated", "expected", "found"});
}

TEST_F(IdxFileTest, ExcessBytesFail) {
  expect_failure(folder_.write("long", content_ + "ab"), {0, 4, 5}, {"too long", "16 bytes", "78 bytes"});
  expect_failure(folder_.write("long.gz", gzip(content_ + "ab")), {0, 4, 5}, {"too long", "16 bytes", "78 bytes"});
  const std::string packed = gzip(content_);
  expect_failure(folder_.write("trailing.gz", packed + "abc"), {0, 4, 5},
                 {"trailing", std::to_string(packed.size()), std::to_string(packed.size() + 3)});
}

TEST_F(IdxFileTest, NotGzip) {
  expect_failure(folder_.write("page.gz", "<!DOCTYPE html>"), {0, 4, 5}, {"not a gzip file", "3c 21", "1f 8b"});
}

TEST_F(IdxFileTest, GzipUnderAPlainName) {
  expect_failure(folder_.write("plain", gzip(content_)), {0, 4, 5}, {"1f 8b", "00 00 08 03", ".gz"});
}

TEST_F(IdxFileTest, CorruptGzipGivesZlibsReason) {
  std::string packed = gzip(content_);
  packed[packed.size() - 6] ^= 1;  // in the check sum
  expect_failure(folder_.write("check.gz", packed), {0, 4, 5}, {"corrupt gzip", "incorrect data check"});
  packed = gzip(content_);
  packed[10] = '\x07';  // a block of the reserved type
  expect_failure(folder_.write("block.gz", packed), {0, 4, 5}, {"corrupt gzip", "invalid block type"});
}

TEST_F(IdxFileTest, NoFlippedBitChangesTheContentUnnoticed) {
  const std::string packed = gzip(content_);
  int refused = 0;
  for (size_t bit = 0; bit < packed.size() * 8; ++bit) {
    std::string flipped = packed;
    flipped[bit / 8] ^= static_cast<char>(1 << bit % 8);
    const auto path = folder_.write("flipped.gz", flipped);
    const std::string failure = failure_of<Error>([&] {
      const IdxFile idx = read_idx(path, {0, 4, 5});
      EXPECT_EQ(std::string(idx.bytes.begin(), idx.bytes.end()), ramp(60)) << "bit " << bit;
    });
    refused += failure.find(path.string()) == 0;
  }
  // Gzip's own header has 49 bits that mean nothing to the content (time, system, ...), and deflate pads to a byte.
  EXPECT_GE(refused, static_cast<int>(packed.size() * 8) - 49 - 7);
}

TEST_F(IdxFileTest, BadMagic) {
  for (size_t byte = 0; byte < 4; ++byte) {
    std::string content = content_;
    content[byte] ^= 0x11;
    expect_failure(folder_.write("magic", content), {0, 4, 5}, {"not an IDX file", "expected 00 00 08 03"});
  }
}

TEST_F(IdxFileTest, WrongShape) {
  expect_failure(folder_.write("shape", content_), {0, 28, 28}, {"0 x 28 x 28", "found 3 x 4 x 5"});
}

TEST_F(IdxFileTest, HugeDimensionsFailBeforeAllocation) {
  for (uint32_t side : {0xffffffffu, 0x7fffffffu, 0x10000u}) {
    const std::string content = idx_header({side, side, side}) + "abc";
    expect_failure(folder_.write("huge", content), {0, 0, 0}, {"truncated", std::to_string(side)});
    expect_failure(folder_.write("huge.gz", gzip(content)), {0, 0, 0}, {"truncated", std::to_string(side)});
  }
  // Within deflate's reach, beyond what is there: allocated, bounded by the size of the file, and refused.
  expect_failure(folder_.write("large.gz", gzip(idx_header({100, 100}) + ramp(60))), {0, 0},
                 {"truncated", "100 x 100", "72 bytes"});
  EXPECT_EQ(read_idx(folder_.write("zeros.gz", gzip(idx_header({5000, 1000}) + std::string(5000000, '\0'))), {0, 0})
                .bytes.size(),
            5000000u)
      << "the most compressible content must pass the bound";
}

TEST_F(IdxFileTest, UnreadableFiles) {
  expect_failure(folder_.path() / "missing", {0}, {"No such file"});
  std::filesystem::create_directory(folder_.path() / "folder");
  expect_failure(folder_.path() / "folder", {0}, {"not a regular file"});
  ASSERT_EQ(::mkfifo((folder_.path() / "pipe").c_str(), 0600), 0);
  expect_failure(folder_.path() / "pipe", {0}, {"not a regular file"});
}

TEST_F(IdxFileTest, FindsPlainFirstThenGzip) {
  folder_.write("a.gz", "");
  EXPECT_EQ(find_idx(folder_.path(), "a", ""), folder_.path() / "a.gz");
  folder_.write("a", "");
  EXPECT_EQ(find_idx(folder_.path(), "a", ""), folder_.path() / "a");
  std::string text = failure_of<Error>([&] { find_idx(folder_.path(), "b", "Do this."); });
  EXPECT_NE(text.find("neither b nor b.gz. Do this."), std::string::npos) << text;
  EXPECT_NE(text.find(folder_.path().string()), std::string::npos) << text;
  text = failure_of<Error>([&] { find_idx(folder_.path() / "c", "b", "Do this."); });
  EXPECT_NE(text.find("does not exist. Do this."), std::string::npos) << text;
}

}  // namespace
}  // namespace lockstep
