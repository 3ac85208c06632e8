#include "collectives/hierarchical/job_watch.h"

#include <gtest/gtest.h>

namespace lockstep::hierarchical_engine {
namespace {

using std::chrono::milliseconds;

TEST(JobWatch, LooksAfterAWhileAndThenAtGrowingIntervals) {
  JobWatch watch([] {}, [] {});
  const auto begun = Clock::now();
  watch.begin(begun);
  for (const int at : {400, 1200, 3600, 8600, 13600}) {
    EXPECT_FALSE(watch.begin_look(begun + milliseconds(at - 1))) << at;
    EXPECT_EQ(watch.pause(begun + milliseconds(at - 1)), milliseconds(1)) << at;
    ASSERT_TRUE(watch.begin_look(begun + milliseconds(at))) << at;
    watch.end_look(begun + milliseconds(at));
  }
}

TEST(JobWatch, OneThreadLooksAtATimeAndTheNextJobBeginsAnew) {
  int looks = 0;
  JobWatch watch([&] { ++looks; }, [] {});
  const auto begun = Clock::now();
  watch.begin(begun);
  ASSERT_TRUE(watch.begin_look(begun + milliseconds(500)));
  EXPECT_FALSE(watch.begin_look(begun + milliseconds(500)));
  watch.watch();
  EXPECT_EQ(looks, 1);
  watch.end_look(begun + milliseconds(500));
  watch.begin(begun + milliseconds(600));
  EXPECT_FALSE(watch.begin_look(begun + milliseconds(999)));
  EXPECT_TRUE(watch.begin_look(begun + milliseconds(1000)));
}

}  // namespace
}  // namespace lockstep::hierarchical_engine
