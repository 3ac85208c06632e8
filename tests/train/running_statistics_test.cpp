#include <lockstep/running_statistics.h>

#include <limits>

#include <gtest/gtest.h>
#include <lockstep/assert_equal.h>
#include <lockstep/checkpoint.h>
#include <torch/torch.h>

#include "support/complaint.h"
#include "support/ranks.h"

namespace lockstep::running_statistics_test {
namespace {

using namespace testing;  // NOLINT

class RunningStatisticsOn : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Engines, RunningStatisticsOn,
                         ::testing::Values(Engine{1, ""}, Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"},
                                           Engine{3, "gloo"}),
                         [](const auto& instance) { return name_of(instance.param); });

/// Far from zero, where sums of squares would lose all digits.
at::Tensor samples_of(int step, int rank) {
  torch::manual_seed(100 * step + rank);
  const int64_t count = (step + rank) % 3 == 0 ? 0 : 5 + rank;
  return at::randn({count, 2, 3}, at::kDouble) * at::arange(1, 4) + 1e6;
}

at::Tensor all_samples(int step, int ranks) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < ranks; ++rank) all.push_back(samples_of(step, rank));
  return at::cat(all);
}

TEST_P(RunningStatisticsOn, AreThoseOfAllSamples) {
  run_ranks(GetParam(), [](Context& context) {
    RunningStatistics seen(std::vector<int64_t>{2, 3});
    EXPECT_TRUE(seen->mean().equal(at::zeros({2, 3}, at::kDouble)));
    EXPECT_TRUE(seen->variance().equal(at::ones({2, 3}, at::kDouble)));
    std::vector<at::Tensor> all;
    for (int step = 0; step < 6; ++step) {
      seen->update(samples_of(step, context.rank()), context.group());
      all.push_back(all_samples(step, context.world_size()));
    }
    const at::Tensor expected = at::cat(all);
    EXPECT_EQ(seen->count(), expected.size(0));
    EXPECT_TRUE(at::allclose(seen->mean(), expected.mean(0), 1e-14, 0));
    EXPECT_TRUE(at::allclose(seen->variance(), expected.var(0, /*unbiased=*/false), 1e-9, 0));
    assert_equal_across_ranks(context.group(), *seen);

    const at::Tensor normal = seen(expected);
    EXPECT_LT(normal.mean().abs().item<double>(), 1e-7);
    EXPECT_TRUE(at::allclose(seen->denormalized(normal), expected, 1e-12, 0));
    EXPECT_EQ(seen(expected.to(at::kFloat)).scalar_type(), at::kFloat);
    EXPECT_EQ(seen(expected + 1e9).max().item<double>(), 10);

    RunningStatistics again(std::vector<int64_t>{2, 3});
    load_state_dict(*again, state_dict(*seen));
    EXPECT_TRUE(again(expected).equal(normal));
    const auto copy = std::dynamic_pointer_cast<RunningStatisticsImpl>(seen->clone());
    copy->update(samples_of(1, context.rank()), context.group());
    EXPECT_TRUE(again->mean().equal(seen->mean())) << "a clone has buffers of its own";
  });
}

TEST_P(RunningStatisticsOn, WrongSamplesOfOneRankAreToldToAll) {
  run_ranks(GetParam(), [](Context& context) {
    RunningStatistics seen(std::vector<int64_t>{3});
    seen->update(at::rand({4, 3}), context.group());
    const auto before = state_dict(*seen);
    const bool odd = context.rank() == context.world_size() - 1;
    const std::string name = "rank " + std::to_string(context.world_size() - 1);
    const auto said = [&](const at::Tensor& samples) {
      try {
        seen->update(samples, context.group());
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string();
    };
    EXPECT_EQ(said(at::rand({2, odd ? 4 : 3})),
              "RunningStatistics::update(), of [n, 3]: " + name + " gave samples of another shape");
    EXPECT_EQ(said(at::full({2, 3}, odd ? NAN : 1.)),
              "RunningStatistics::update(), of [n, 3]: " + name + " gave infinity or NaN");
    EXPECT_EQ(said(odd ? at::Tensor() : at::rand({2, 3})),
              "RunningStatistics::update(), of [n, 3]: " + name + " gave samples of another shape");
    for (const auto& item : before) EXPECT_TRUE(item.value().equal(state_dict(*seen)[item.key()])) << item.key();
  });
}

TEST_P(RunningStatisticsOn, StandardizesOverAllRanks) {
  run_ranks(GetParam(), [](Context& context) {
    const auto values_of = [](int rank) { return at::arange(rank == 1 ? 0 : 3 + rank, at::kDouble) * (rank + 1) + 5; };
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < context.world_size(); ++rank) all.push_back(values_of(rank));
    const at::Tensor whole = at::cat(all), own = values_of(context.rank());
    const at::Tensor expected = (own - whole.mean()) / (whole.std() + 1e-8);
    EXPECT_TRUE(at::allclose(standardize(own, context.group()), expected, 1e-12, 1e-14));
    EXPECT_EQ(standardize(own.to(at::kFloat), context.group()).scalar_type(), at::kFloat);
    EXPECT_TRUE(standardize(at::full({2}, 7.), context.group()).equal(at::zeros({2})));
    EXPECT_TRUE(standardize(at::full({context.rank() == 0 ? 1 : 0}, 7.), context.group())
                    .equal(at::zeros({context.rank() == 0 ? 1 : 0})));
  });
}

TEST(RunningStatisticsTest, RefusesOptionsThatAreNone) {
  for (const RunningStatisticsOptions& options :
       {RunningStatisticsOptions{.epsilon = -1}, RunningStatisticsOptions{.limit = NAN}})
    EXPECT_NE(
        complaint([&] { RunningStatistics(std::vector<int64_t>{2}, options); }).find("must be finite and at least 0"),
        std::string::npos);
}

}  // namespace
}  // namespace lockstep::running_statistics_test
