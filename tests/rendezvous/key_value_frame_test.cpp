#include "rendezvous/key_value_frame.h"

#include <gtest/gtest.h>

#include <cstring>

#include "base/error.h"

namespace lockstep {
namespace {

std::string length_prefix(uint32_t length) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes;
}

TEST(KeyValueFrame, ComesBackAsItWasWritten) {
  const std::string binary("a\0b", 3);
  std::string bytes;
  append_frame(bytes, 7, 2, {"key", binary, ""});
  append_frame(bytes, 8, 0, {});
  const auto first = parse_frame(bytes);
  ASSERT_TRUE(first);
  EXPECT_EQ(first->id, 7u);
  EXPECT_EQ(first->code, 2);
  EXPECT_EQ(first->fields, (std::vector<std::string_view>{"key", binary, ""}));
  const auto second = parse_frame(std::string_view(bytes).substr(first->bytes));
  ASSERT_TRUE(second);
  EXPECT_EQ(second->id, 8u);
  EXPECT_TRUE(second->fields.empty());
  EXPECT_EQ(first->bytes + second->bytes, bytes.size());
}

TEST(KeyValueFrame, WaitsForTheRestOfEveryPrefix) {
  std::string bytes;
  append_frame(bytes, 1, 0, {"key", "value"});
  for (size_t size = 0; size < bytes.size(); ++size) EXPECT_FALSE(parse_frame(bytes.substr(0, size))) << size;
  EXPECT_TRUE(parse_frame(bytes));
}

TEST(KeyValueFrame, RefusesBadLengths) {
  EXPECT_THROW(parse_frame(length_prefix(0)), Error);
  EXPECT_THROW(parse_frame(length_prefix(4)), Error);
  EXPECT_THROW(parse_frame(length_prefix(0xffffffff)), Error);
  std::string bytes;
  append_frame(bytes, 1, 0, {"key"});
  bytes[9] = 4;  // the field claims one byte more than its frame has
  EXPECT_THROW(parse_frame(bytes), Error);
  EXPECT_THROW(parse_frame(length_prefix(7) + std::string(7, 'x')), Error) << "ends inside a field's length";
}

TEST(KeyValueFrame, ChecksRequests) {
  const auto check = [](uint8_t code, std::vector<std::string_view> fields) {
    check_request({.code = code, .fields = std::move(fields)});
  };
  const std::string long_key(kMaxKeyBytes + 1, 'k'), long_value(kMaxValueBytes + 1, 'v');
  EXPECT_NO_THROW(check(0, {"key", "value"}));
  EXPECT_NO_THROW(check(6, {}));
  EXPECT_THROW(check(0, {"key"}), Error);
  EXPECT_THROW(check(1, {}), Error);
  EXPECT_THROW(check(10, {}), Error);
  EXPECT_THROW(check(0, {long_key, "value"}), Error);
  EXPECT_THROW(check(0, {"key", long_value}), Error);
  EXPECT_THROW(check(6, {"key", long_key}), Error);
}

}  // namespace
}  // namespace lockstep
