#include "reducer/facts.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

/// Facts that differ from rank to rank.
Facts facts_of(int rank) {
  return {.active = rank % 3 != 1,
          .skipped = rank % 4 == 2,
          .spoiled = rank % 8 == 2,
          .joining = rank % 2 == 0,
          .trouble = rank % 5 == 4,
          .late = rank % 7 == 2,
          .passes = (rank * 37 + 255) & 255,
          .object = (rank * 91 + 200) & 255,
          .weight = rank == 0 ? 0.1 : 1e300 / (rank * 3.0 + 1),
          .policy = static_cast<NonFinitePolicy>(rank % 3),
          .data = rank == 1 ? 0 : 0x9e3779b97f4a7c15 * static_cast<uint64_t>(rank + 1),
          .odd_shard = rank % 6 == 5,
          .settings = {.divides_by_active = rank % 2 == 1,
                       .throws_early = rank % 3 == 2,
                       .checks = rank * 29 & 255,
                       .frozen = rank * 53 & 255}};
}

class FactsIn : public ::testing::TestWithParam<at::ScalarType> {};
INSTANTIATE_TEST_SUITE_P(Dtypes, FactsIn,
                         ::testing::Values(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat),
                         [](const auto& instance) { return c10::toString(instance.param); });

TEST_P(FactsIn, ReachEveryRankExactlyBySumAndByMean) {
  for (const int ranks : {2, 3, 7, 64, 300}) {
    at::Tensor sum = at::zeros({ranks * kFactElements}, GetParam());
    for (int rank = 0; rank < ranks; ++rank) {
      at::Tensor table = at::full({ranks * kFactElements}, 9, GetParam());
      write_facts(table, rank, facts_of(rank));
      sum += table;
    }
    for (const bool averaged : {false, true}) {
      const auto all = read_facts(averaged ? sum / ranks : sum, averaged);
      ASSERT_EQ(all.size(), static_cast<size_t>(ranks));
      for (int rank = 0; rank < ranks; ++rank)
        EXPECT_EQ(all[static_cast<size_t>(rank)], facts_of(rank)) << rank << " of " << ranks;
    }
  }
}

}  // namespace
}  // namespace lockstep
