#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <thread>

#include <ATen/ATen.h>
#include <torch/cuda.h>
#include <torch/nn.h>

#include <lockstep/assert_equal.h>
#include <lockstep/device.h>
#include <lockstep/error.h>
#include <lockstep/rank_zero.h>

#include "checkpoint/failure.h"
#include "context/device.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::failure;
using testing::run_ranks;

class RankZero : public ::testing::TestWithParam<int> {
 protected:
  void on_ranks(const std::function<void(Context&)>& body) const { run_ranks(GetParam(), body); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, RankZero, ::testing::Values(1, 2, 3), ::testing::PrintToStringParamName());

// ---- device ----

TEST(Device, IsTheLocalRanksWhereThereIsCuda) {
  EXPECT_EQ(device_of(3, 0), at::Device(at::kCPU));
  EXPECT_EQ(device_of(0, 4), at::Device(at::kCUDA, 0));
  EXPECT_EQ(device_of(3, 4), at::Device(at::kCUDA, 3));
  EXPECT_EQ(device_of(3, 1), at::Device(at::kCUDA, 0));  // each rank sees its own alone
}

TEST_P(RankZero, DeviceKnowsTheRankOfTheContext) {
  on_ranks([](Context& context) {
    EXPECT_EQ(device(), device_of(context.local_rank(), static_cast<int>(torch::cuda::device_count())));
  });
}

// ---- rank 0 ----

TEST_P(RankZero, RankZeroOnlyRunsThereAndNowhereElse) {
  on_ranks([](Context& context) {
    const std::optional<int> answer = rank_zero_only(context.group(), [] { return 42; });
    EXPECT_EQ(answer, context.rank() == 0 ? std::optional(42) : std::nullopt);
    bool ran = false;
    rank_zero_only(context.group(), [&] { ran = true; });
    EXPECT_EQ(ran, context.rank() == 0);
  });
}

TEST_P(RankZero, FromRankZeroGivesAllTheSameValue) {
  on_ranks([](Context& context) {
    const Group& group = context.group();
    EXPECT_EQ(from_rank_zero(group, [&] { return int64_t{7} + context.rank(); }), 7);
    EXPECT_EQ(from_rank_zero(group, [] { return 0.1; }), 0.1);
    EXPECT_TRUE(from_rank_zero(group, [] { return true; }));
    EXPECT_EQ(from_rank_zero(group, [] { return std::string("runs/7"); }), "runs/7");
    EXPECT_EQ(from_rank_zero(group,
                             [] {
                               return std::vector<std::string>{"a", ""};
                             }),
              (std::vector<std::string>{"a", ""}));
    EXPECT_TRUE(at::equal(from_rank_zero(group,
                                         [&] {
                                           return at::full({2, 3}, context.rank() + 0.5);
                                         }),
                          at::full({2, 3}, 0.5)));
    int calls = 0;
    from_rank_zero(group, [&] { ++calls; });
    EXPECT_EQ(calls, context.rank() == 0 ? 1 : 0);
  });
}

TEST_P(RankZero, WhatRankZeroThrowsAllThrow) {
  on_ranks([](Context& context) {
    const auto fail = [](const Group& group) {
      return failure([&] { from_rank_zero(group, []() -> int64_t { throw Error("no such file"); }); });
    };
    EXPECT_EQ(fail(context.group()), context.rank() == 0
                                         ? "no such file"
                                         : "rank 0 failed in the function that it runs for all ranks: no such file");
    EXPECT_EQ(from_rank_zero(context.group(), [] { return 1; }), 1);  // the group is as good as before
  });
}

// ---- main first ----

TEST_P(RankZero, MainIsThroughBeforeTheOthersEnter) {
  const TemporaryFolder folder;
  on_ranks([&](Context& context) {
    for (int round = 0; round < 3; ++round) {
      const auto file = folder.path() / std::to_string(round);
      {
        const auto order = main_first(context);
        EXPECT_EQ(std::filesystem::exists(file), context.rank() != 0) << "round " << round;
        if (context.rank() == 0) {
          std::this_thread::sleep_for(std::chrono::milliseconds(50));
          std::ofstream(file) << "unpacked";
        }
      }
      context.group().barrier();
    }
  });
}

TEST_P(RankZero, NobodyFollowsAMainThatFailed) {
  on_ranks([](Context& context) {
    bool entered = false;
    const std::string problem = failure([&] {
      const auto order = main_first(context);
      entered = true;
      throw Error("the disk is full");
    });
    EXPECT_EQ(entered, context.rank() == 0);
    EXPECT_NE(problem.find(context.rank() == 0 ? "the disk is full" : "rank 0 failed in the scope of main_first()"),
              std::string::npos)
        << problem;
    const auto order = main_first(context);  // and the next one is as good as new
  });
}

TEST(MainFirst, WaitsNoLongerThanACollectiveMay) {
  run_ranks(2,
            [](Context& context) {
              const auto start = std::chrono::steady_clock::now();
              const std::string problem = failure([&] {
                const auto order = main_first(context);
                if (context.rank() == 0) std::this_thread::sleep_for(std::chrono::seconds(3));
              });
              EXPECT_NE(problem, "");  // on rank 0 too: the other is gone when its scope ends
              if (context.rank() == 1) {
                EXPECT_NE(problem.find("rank 0"), std::string::npos) << problem;
                EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
              }
            },
            std::chrono::seconds(60), {.collective_timeout = std::chrono::seconds(1), .announce = false});
}

// ---- equal across ranks ----

TEST_P(RankZero, EqualTensorsPass) {
  on_ranks([](Context& context) {
    const at::Tensor special = at::tensor({0.0 / 0.0, -0.0, 1.0}, at::kDouble);
    assert_equal_across_ranks(context.group(), {{"special", special},
                                                {"transposed", at::arange(6).view({2, 3}).t()},
                                                {"none", at::Tensor()},
                                                {"empty", at::empty({0, 2})},
                                                {"bool", at::ones({3}, at::kBool)}});
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    assert_equal_across_ranks(context.group(), *net);
    assert_equal_across_ranks(context.group(), "bias", net->parameters()[1]);
  });
}

TEST_P(RankZero, TheOddTensorAndTheOddRankAreNamed) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank differs from none";
  on_ranks([](Context& context) {
    const int last = context.world_size() - 1;
    const bool odd = context.rank() == last;
    const auto problem = [&](const auto&... tensors) {
      return failure([&] { assert_equal_across_ranks(context.group(), tensors...); });
    };
    const auto expect = [&](const std::string& text, const std::string& part) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    };
    const std::string odd_rank = "rank " + std::to_string(last);
    torch::manual_seed(1);
    torch::nn::Sequential net(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4));
    const at::NoGradGuard no_grad;
    if (odd) net->named_buffers()["1.running_var"][2] = 1 + 1e-6;
    const std::string buffer = problem(*net);
    // With two ranks there is no majority: rank 0 is right.
    expect(buffer, "1.running_var on " + odd_rank + " differs from that on rank" + (last == 1 ? " 0" : "s 0, 1"));
    if (odd) net->parameters()[1][0] += 1;  // comes first
    expect(problem(*net), "0.bias on " + odd_rank);
    expect(problem(std::string("zero"), at::full({1}, odd ? -0.0 : 0.0)), "zero on " + odd_rank);
    const at::Tensor longer = at::zeros({odd ? 3 : 2});
    expect(problem(std::string("offsets"), longer), "`offsets: Float [3]` on " + odd_rank);
    expect(problem(std::string("offsets"), odd ? at::zeros({2}, at::kDouble) : longer), "Double [2]");
    expect(problem(std::string("weight.grad"), odd ? at::Tensor() : longer), "`weight.grad: undefined` on " + odd_rank);
    expect(problem(NamedTensors(odd ? 1 : 2, {"a", at::ones({1})})), "nothing (it has 1)");
    assert_equal_across_ranks(context.group(), "same", at::ones({1}));
  });
}

}  // namespace
}  // namespace lockstep
