#include "reducer/bucket_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace lockstep {
namespace {

using Plan = std::vector<std::vector<size_t>>;

TEST(BucketPlan, GoesBackwardsWithASmallFirstBucket) {
  EXPECT_EQ(plan_buckets({{40, 0}, {40, 0}, {40, 0}, {40, 0}, {10, 0}}, {10, 80}), (Plan{{4}, {3, 2}, {1, 0}}));
}

TEST(BucketPlan, AParameterOverTheLimitEndsItsBucket) {
  EXPECT_EQ(plan_buckets({{8, 0}, {1000, 0}, {8, 0}}, {1, 100}), (Plan{{2}, {1}, {0}}));
}

TEST(BucketPlan, WhatIsLeftMakesALastBucket) { EXPECT_EQ(plan_buckets({{1, 0}, {2, 0}}, {100, 100}), (Plan{{1, 0}})); }

TEST(BucketPlan, KindsNeverShareABucket) {
  EXPECT_EQ(plan_buckets({{60, 0}, {60, 1}, {60, 0}, {60, 1}}, {100, 100}), (Plan{{3, 1}, {2, 0}}));
}

TEST(BucketPlan, NothingMakesNoBucket) { EXPECT_TRUE(plan_buckets({}, {1, 1}).empty()); }

TEST(BucketLayout, EveryGradientBeginsAt64Bytes) {
  EXPECT_EQ(bucket_layout({10, 16, 1, 20480}, 4), (std::vector<int64_t>{0, 16, 32, 48, 20528}));
  EXPECT_EQ(bucket_layout({10, 16, 1, 20480}, 2), (std::vector<int64_t>{0, 32, 64, 96, 20576}));
  EXPECT_EQ(bucket_layout({3, 0, 5}, 8), (std::vector<int64_t>{0, 8, 8, 13}));
  EXPECT_EQ(bucket_layout({7}, 16), (std::vector<int64_t>{0, 7}));
  EXPECT_EQ(bucket_layout({100}, 1), (std::vector<int64_t>{0, 100}));
}

TEST(BucketPlan, EveryParameterIsInOneBucketOfItsKind) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<ParameterSize> parameters(random() % 40);
    for (auto& parameter : parameters)
      parameter = {static_cast<int64_t>(random() % 5000), static_cast<int>(random() % 3)};
    std::vector<size_t> seen;
    for (const auto& bucket : plan_buckets(parameters, {500, 4000})) {
      int64_t bytes_before_last = 0;
      for (size_t i = 0; i < bucket.size(); ++i) {
        EXPECT_EQ(parameters[bucket[i]].kind, parameters[bucket[0]].kind);
        if (i + 1 < bucket.size()) bytes_before_last += parameters[bucket[i]].bytes;
        seen.push_back(bucket[i]);
      }
      EXPECT_LT(bytes_before_last, 4000);
    }
    std::sort(seen.begin(), seen.end());
    ASSERT_EQ(seen.size(), parameters.size());
    for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i);
  }
}

}  // namespace
}  // namespace lockstep
