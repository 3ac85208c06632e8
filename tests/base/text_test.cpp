#include "base/text.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(Printable, KeepsTextAndShowsTheRest) {
  EXPECT_EQ(printable("layer.0 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80"),
            "layer.0 \xc3\xa9 \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(printable(std::string_view("\x1b[31m\n\0\x7f", 8)), "\\x1b[31m\\x0a\\x00\\x7f");
  // C1 controls, overlong forms, surrogates, beyond Unicode, cut off.
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");
  EXPECT_EQ(printable("\xc0\xaf\xe0\x80\xaf"), "\\xc0\\xaf\\xe0\\x80\\xaf");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");
  EXPECT_EQ(printable("a\xe2\x82"), "a\\xe2\\x82");
}

TEST(FirstDifference, NoneWhereAllAgree) {
  EXPECT_EQ(first_difference("parameter", {"a: x\nb: y\n", "a: x\nb: y\n"}), "");
}

TEST(FirstDifference, NamesBothSidesAndAllRanks) {
  EXPECT_EQ(first_difference("parameter", {"a: x\nb: y\n", "a: x\nb: z\n", "a: x\nb: y\n"}),
            "parameter 1 is `b: y` on ranks 0, 2 and `b: z` on rank 1");
}

TEST(FirstDifference, SaysWhereAListIsShorter) {
  EXPECT_EQ(first_difference("buffer", {"a: x\n", "a: x\nb: y\n"}),
            "buffer 1 is `nothing (it has 1)` on rank 0 and `b: y` on rank 1");
}

TEST(Formatted, EndsWhereItsRoomDoes) {
  EXPECT_EQ(formatted("%.1f of %s", 2.25, "all"), "2.2 of all");
  EXPECT_EQ(formatted("%0200d", 1).size(), 159);
}

TEST(NumberIn, IsMinusOneWithoutDigits) {
  EXPECT_EQ(number_in("17"), 17);
  EXPECT_EQ(number_in("x"), -1);
  EXPECT_EQ(number_in({}), -1);
}

}  // namespace
}  // namespace lockstep
