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

}  // namespace
}  // namespace lockstep
