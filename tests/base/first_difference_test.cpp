#include "base/text.h"

#include <gtest/gtest.h>

namespace lockstep::first_difference_test {
namespace {

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

}  // namespace
}  // namespace lockstep::first_difference_test
