#include "trainer/best_score.h"

#include <gtest/gtest.h>

namespace lockstep::best_score_test {
namespace {

TEST(BestScore, ABetterOneEndsTheWait) {
  BestScore best;
  EXPECT_TRUE(best.take(0.5, 0, /*higher_is_better=*/true));
  EXPECT_FALSE(best.take(0.5, 1, true));
  EXPECT_FALSE(best.take(0.4, 2, true));
  EXPECT_EQ(best.waited, 2);
  EXPECT_TRUE(best.take(0.6, 3, true));
  EXPECT_EQ(best.waited, 0);
  EXPECT_EQ(best.epoch, 3);
  EXPECT_EQ(best.score, 0.6);
}

TEST(BestScore, LowerMayBeBetter) {
  BestScore best;
  EXPECT_TRUE(best.take(0.5, 0, /*higher_is_better=*/false));
  EXPECT_FALSE(best.take(0.6, 1, false));
  EXPECT_TRUE(best.take(0.4, 2, false));
}

TEST(BestScore, OneThatIsNotFiniteIsNeverTheBest) {
  BestScore best;
  EXPECT_FALSE(best.take(std::numeric_limits<double>::quiet_NaN(), 0, true));
  EXPECT_FALSE(best.take(std::numeric_limits<double>::infinity(), 1, true));
  EXPECT_EQ(best.epoch, -1);
  EXPECT_EQ(best.waited, 2);
  EXPECT_TRUE(best.take(0.1, 2, true));
}

}  // namespace
}  // namespace lockstep::best_score_test
