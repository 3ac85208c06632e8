#include <lockstep/loader_stats.h>

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(LoaderStats, AdvisesByWhatIsSlow) {
  EXPECT_EQ(LoaderStats().advice(), "");
  EXPECT_EQ((LoaderStats{.workers = 1, .seconds = 100, .waiting_seconds = 4, .reading_seconds = 50}).advice(), "");
  EXPECT_EQ(
      (LoaderStats{.workers = 1, .seconds = 100, .waiting_seconds = 41, .reading_seconds = 10, .transform_seconds = 85})
          .advice(),
      "training waited 41 % of the epoch for data; most of the loader's time is transforms; more workers (now 1) "
      "may help");
  EXPECT_EQ((LoaderStats{.workers = 0, .seconds = 10, .waiting_seconds = 5, .reading_seconds = 5}).advice(),
            "training waited 50 % of the epoch for data; most of the loader's time is reading; a worker would prepare "
            "batches while the loop computes (workers = 1)");
  EXPECT_EQ(
      (LoaderStats{.workers = 2, .seconds = 10, .waiting_seconds = 5, .reading_seconds = 6}).advice(),
      "training waited 50 % of the epoch for data; most of the loader's time is reading; the workers were busy only "
      "30 % of it, so a larger prefetch, or fewer and longer passes, may help more than more workers (now 2)");
}

}  // namespace
}  // namespace lockstep
