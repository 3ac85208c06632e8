#include <lockstep/token_file.h>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <lockstep/error.h>

#include <filesystem>

#include "data/idx_writer.h"

namespace lockstep {
namespace {

using datasets::TokenFile;
using datasets::TokenFileOptions;
using datasets::TokenType;

std::string tokens16(int count, int first = 0) {
  std::string bytes;
  for (int i = first; i < first + count; ++i) bytes += {static_cast<char>(i & 255), static_cast<char>(i >> 8)};
  return bytes;
}

class TokenFileTest : public ::testing::Test {
 protected:
  static std::string failure(const std::filesystem::path& path, TokenFileOptions options) {
    return failure_of<Error>([&] { TokenFile(path, options); });
  }
  static void expect_parts(const std::string& text, std::initializer_list<std::string> parts) {
    for (const auto& part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
  }
  const TemporaryFolder folder_;
};

TEST_F(TokenFileTest, TargetsAreOneFurther) {
  const auto path = folder_.write("train.bin", tokens16(1000, 300));
  const TokenFile data(path, {.block_length = 16});
  EXPECT_EQ(data.tokens(), 1000);
  EXPECT_EQ(data.size(), 62);  // 62 x 16 = 992, and the token after it
  EXPECT_EQ(data.unused_tokens(), 8);
  const Batch batch = data.get({0, 61, 3});
  EXPECT_TRUE(at::equal(batch.data[0], at::arange(300, 316)));
  EXPECT_TRUE(at::equal(batch.data[1], at::arange(300 + 976, 300 + 992)));
  EXPECT_TRUE(at::equal(batch.target, batch.data + 1));
  EXPECT_EQ(batch.target.scalar_type(), at::kLong);
  EXPECT_THROW(data.get({62}), c10::Error);
  EXPECT_THROW(data.get({-1}), c10::Error);
  // One block and its target exactly.
  EXPECT_EQ(TokenFile(folder_.write("exact.bin", tokens16(17)), {.block_length = 16}).size(), 1);
  EXPECT_EQ(TokenFile(path, {.block_length = 1}).get({0}).target.item<int64_t>(), 301);
}

TEST_F(TokenFileTest, PartsAndStrides) {
  const auto path = folder_.write("all.bin", tokens16(1000));
  const TokenFile train(path, {.block_length = 10, .from = 0, .to = 0.9});
  const TokenFile test(path, {.block_length = 10, .from = 0.9, .to = 1});
  EXPECT_EQ(train.tokens(), 900);
  EXPECT_EQ(test.tokens(), 100);
  EXPECT_EQ(train.get({train.size() - 1}).target.max().item<int64_t>(), 890);
  EXPECT_EQ(test.get({0}).data.min().item<int64_t>(), 900);
  EXPECT_EQ(test.get({test.size() - 1}).target.max().item<int64_t>(), 990);
  const TokenFile all(path, {.block_length = 10, .stride = 1});
  EXPECT_EQ(all.size(), 990);
  EXPECT_EQ(all.get({989}).target.max().item<int64_t>(), 999);
}

TEST_F(TokenFileTest, TextIsBytesAndWideTokensAreWide) {
  const TokenFile text(folder_.write("a.txt", "caf\xc3\xa9 au lait"), {.block_length = 5, .type = TokenType::kByte});
  EXPECT_TRUE(at::equal(text.get({0}).data[0], at::tensor({'c', 'a', 'f', 0xc3, 0xa9}, at::kLong)));
  const TokenFile wide(folder_.write("wide.bin", std::string("\xff\xff\xff\xff\x01\x00\x00\x80\x02\x00\x00\x00", 12)),
                       {.block_length = 2, .type = TokenType::kUInt32});
  EXPECT_TRUE(at::equal(wide.get({0}).data[0], at::tensor({0xffffffffL, 0x80000001L}, at::kLong)));
  EXPECT_EQ(wide.get({0}).target[0][1].item<int64_t>(), 2);
}

TEST_F(TokenFileTest, SaysWhatToDo) {
  expect_parts(failure(folder_.path() / "none.bin", {}), {"none.bin", "No such file"});
  expect_parts(failure(folder_.path(), {}), {folder_.path().string(), "is not a regular file"});
  const auto odd = folder_.write("odd.bin", tokens16(40) + "x");
  expect_parts(failure(odd, {.block_length = 4}),
               {"odd.bin: expected whole tokens of 2 bytes, found 81 bytes, 1 too many", "TokenFileOptions::type"});
  const auto few = folder_.write("few.bin", tokens16(16));
  expect_parts(failure(few, {.block_length = 16}),
               {"few.bin: expected at least 17 tokens", "found 16", "a shorter block_length"});
  expect_parts(failure(folder_.write("empty.bin", ""), {.block_length = 1}),
               {"empty.bin: expected at least 2 tokens", "found 0"});
  EXPECT_THROW(TokenFile(few, {.block_length = 0}), c10::Error);
  EXPECT_THROW(TokenFile(few, {.block_length = 1, .from = 0.5, .to = 0.4}), c10::Error);
  EXPECT_THROW(TokenFile(few, {.block_length = int64_t{1} << 62}), c10::Error);
}

TEST_F(TokenFileTest, ForeignTokensAndShortenedFilesAreNamed) {
  const auto path = folder_.write("train.bin", tokens16(100));
  const TokenFile data(path, {.block_length = 10, .vocabulary = 50});
  EXPECT_NO_THROW(data.get({0, 3}));
  // The fifth block's data end below 50, its last target does not.
  expect_parts(failure_of<Error>([&] { data.get({4}); }),
               {"train.bin: token 50 at position 50, expected tokens below 50"});
  expect_parts(failure_of<Error>([&] { data.get({0, 5}); }), {"token 50 at position 50"});
  std::filesystem::resize_file(path, 30);
  expect_parts(failure_of<Error>([&] { data.get({0}); }),
               {"train.bin: has become shorter since it was opened: expected 200 bytes, found 30"});
}

}  // namespace
}  // namespace lockstep
