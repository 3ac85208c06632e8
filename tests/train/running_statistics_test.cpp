#include <lockstep/running_statistics.h>

#include <cmath>
#include <functional>
#include <string>

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

/// The text of the Error that `call` throws; "" if none.
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// The ranks other than `rank`, by name.
std::string others_than(int rank, int world_size) {
  if (world_size == 2) return "rank " + std::to_string(1 - rank);
  return rank == 0 ? "ranks 1, 2" : rank == 1 ? "ranks 0, 2" : "ranks 0, 1";
}

class RanksThatDiffer : public ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Engines, RanksThatDiffer,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(RanksThatDiffer, HoldOtherStates) {
  run_ranks(GetParam(), [](Context& context) {
    const Group alone = context.group().split(context.rank());
    const std::string others = others_than(0, context.world_size());
    RunningStatistics old(std::vector<int64_t>{2}), seen(std::vector<int64_t>{2});
    old->update(at::rand({50, 2}), alone);
    if (context.rank() == 0) load_state_dict(*seen, state_dict(*old));
    const at::Tensor before = seen->mean().clone();
    const std::string begin = "RunningStatistics::update(), of [n, 2]: ";
    const std::string end = ". Load the same state on every rank, and update with the same group from the start";
    EXPECT_EQ(
        error_of([&] {
          seen->update(at::rand({5, 2}), context.group());
        }),
        begin + "the ranks hold statistics of different numbers of samples: rank 0 of 50, " + others + " of 0" + end);
    EXPECT_EQ(seen->count(), context.rank() == 0 ? 50 : 0);
    EXPECT_TRUE(seen->mean().equal(before));

    RunningStatistics same_count(std::vector<int64_t>{2});
    same_count->update(at::full({5, 2}, context.rank() == 0 ? 1. : 2.), alone);
    EXPECT_EQ(error_of([&] {
                same_count->update(at::rand({5, 2}), context.group());
              }),
              begin + others + " and rank 0 hold different means or variances" + end);
    EXPECT_EQ(same_count->count(), 5);

    RunningStatistics good(std::vector<int64_t>{2});  // the group goes on
    good->update(at::rand({5, 2}), context.group());
    EXPECT_EQ(good->count(), 5 * context.world_size());
  });
}

TEST_P(RanksThatDiffer, UpdateInAnotherOrder) {
  run_ranks(GetParam(), [](Context& context) {
    RunningStatistics a(std::vector<int64_t>{4}), b(std::vector<int64_t>{4});
    const bool swapped = context.rank() == 1;
    const std::string first = error_of([&] { (swapped ? b : a)->update(at::rand({5, 4}), context.group()); });
    const std::string others = context.world_size() == 2 ? "rank 0" : "ranks 0, 2";
    EXPECT_TRUE(has(first, "the ranks update different objects, numbered in the order")) << first;
    EXPECT_TRUE(has(first, ": " + others + " number 1, rank 1 number 2. Make and update them in the same order"))
        << first;
    EXPECT_EQ(a->count() + b->count(), 0);
    a->update(at::rand({5, 4}), context.group());
    std::dynamic_pointer_cast<RunningStatisticsImpl>(a->clone())->update(at::rand({5, 4}), context.group());
  });
}

TEST_P(RanksThatDiffer, HaveOtherShapesOrOptions) {
  run_ranks(GetParam(), [](Context& context) {
    const int rank = context.rank();
    const bool odd = rank == 1;
    RunningStatistics turned(odd ? std::vector<int64_t>{3, 2} : std::vector<int64_t>{2, 3});
    const at::Tensor samples = odd ? at::rand({5, 3, 2}) : at::rand({5, 2, 3});
    const std::string shapes = error_of([&] { turned->update(samples, context.group()); });
    EXPECT_TRUE(has(shapes, odd ? "of [n, 3, 2]: " + others_than(1, context.world_size()) + " called it for samples of"
                                : "of [n, 2, 3]: rank 1 called it for samples of another shape"))
        << shapes;
    EXPECT_EQ(turned->count(), 0);

    RunningStatistics limited(std::vector<int64_t>{1}, RunningStatisticsOptions{.limit = odd ? 0.5 : 10});
    const std::string limits = error_of([&] { limited->update(at::rand({5, 1}), context.group()); });
    const std::string others = others_than(1, context.world_size());
    EXPECT_TRUE(has(limits, "different limits: " + others + " with 10, rank 1 with 0.5")) << limits;

    RunningStatistics one(std::vector<int64_t>{1});
    const std::string calls = error_of([&] {
      if (odd)
        (void)standardize(at::rand({5}), context.group());
      else
        one->update(at::rand({5, 1}), context.group());
    });
    EXPECT_TRUE(has(calls, "called the other one of standardize() and RunningStatistics::update()")) << calls;

    const std::string epsilons = error_of([&] { (void)standardize(at::rand({5}), context.group(), odd ? NAN : 0.25); });
    EXPECT_TRUE(has(epsilons, "different values of epsilon: " + others + " with 0.25, rank 1 with nan")) << epsilons;
  });
}

TEST_P(RunningStatisticsOn, RefuseNumbersThatWouldSpoilThem) {
  run_ranks(GetParam(), [](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    const std::string name = "rank " + std::to_string(context.world_size() - 1);
    RunningStatistics seen(std::vector<int64_t>{1});
    const auto update = [&](const at::Tensor& samples) {
      return error_of([&] { seen->update(samples, context.group()); });
    };
    const auto standardized = [&](const at::Tensor& values) {
      return error_of([&] { (void)standardize(values, context.group()); });
    };
    const at::Tensor fine = at::rand({3, 1}, at::kDouble);
    const at::Tensor huge = at::full({3, 1}, 1e300, at::kDouble), complex = fine.to(at::kComplexDouble);
    const std::string too_large = name + " gave numbers beyond 1e140, whose squares a double cannot hold";
    const std::string other_kind = name + " gave a tensor that is complex, sparse, quantized or without data";
    EXPECT_EQ(update(odd ? huge : fine), "RunningStatistics::update(), of [n, 1]: " + too_large);
    EXPECT_EQ(update(odd ? complex : fine), "RunningStatistics::update(), of [n, 1]: " + other_kind);
    EXPECT_EQ(standardized(odd ? huge : fine), "standardize(): " + too_large);
    EXPECT_EQ(standardized(odd ? complex : fine), "standardize(): " + other_kind);
    EXPECT_EQ(standardized(odd ? at::Tensor() : fine), "standardize(): " + name + " gave an undefined tensor");
    EXPECT_EQ(seen->count(), 0);

    // The largest that are taken leave all finite.
    EXPECT_EQ(update(at::full({3, 1}, odd ? 1e140 : -1e140, at::kDouble)), "");
    EXPECT_TRUE(seen->variance().isfinite().all().item<bool>());
    for (const double epsilon : {-1., double{NAN}, double{INFINITY}}) {
      const std::string said = complaint([&] { (void)standardize(fine, context.group(), epsilon); });
      EXPECT_TRUE(has(said, "standardize(): epsilon is ")) << said;
      EXPECT_TRUE(has(said, "it must be finite and at least 0")) << said;
    }
  });
}

TEST_P(RunningStatisticsOn, TakeIntegersAndReturnFloats) {
  run_ranks(GetParam(), [](Context& context) {
    const int64_t ranks = context.world_size();
    RunningStatistics seen(std::vector<int64_t>{1});
    seen->update(at::arange(4, at::kByte).view({4, 1}), context.group());  // mean 1.5, variance 1.25
    const at::Tensor expected = (at::arange(2, at::kDouble).view({2, 1}) - 1.5) / std::sqrt(1.25);
    for (const at::ScalarType type : {at::kByte, at::kInt, at::kLong, at::kBool}) {
      const at::Tensor normal = seen(at::arange(2).view({2, 1}).to(type));
      EXPECT_EQ(normal.scalar_type(), at::kFloat) << type;
      EXPECT_TRUE(at::allclose(normal, expected.to(at::kFloat))) << type;
      const at::Tensor back = seen->denormalized(at::arange(2).view({2, 1}).to(type));
      EXPECT_EQ(back.scalar_type(), at::kFloat) << type;
      EXPECT_NEAR(back[1].item<double>(), 1.5 + std::sqrt(1.25), 1e-6) << type;
    }
    // A float could not tell these numbers apart. Each appears `ranks` times.
    const at::Tensor values = standardize(at::arange(1, 5) + 1'000'000'000, context.group());
    EXPECT_EQ(values.scalar_type(), at::kFloat);
    const double deviation = std::sqrt(5. * ranks / (4. * ranks - 1));
    EXPECT_TRUE(at::allclose(values, (at::arange(1, 5, at::kFloat) - 2.5) / deviation));
    EXPECT_EQ(standardize(at::ones({2}, at::kBool), context.group()).scalar_type(), at::kFloat);
  });
}

TEST(RunningStatisticsTest, RefusesInputsThatAreNoSamples) {
  RunningStatistics seen(std::vector<int64_t>{4});
  for (const auto& call : {std::function([&](const at::Tensor& x) { (void)seen->forward(x); }),
                           std::function([&](const at::Tensor& x) { (void)seen->denormalized(x); })}) {
    EXPECT_TRUE(has(complaint([&] { call(at::rand({5, 1})); }), "the shape [5, 1], which must be [..., 4]"));
    EXPECT_TRUE(has(complaint([&] { call(at::rand({5, 3})); }), "the shape [5, 3], which must be [..., 4]"));
    EXPECT_TRUE(has(complaint([&] { call(at::rand({})); }), "the shape [], which must be [..., 4]"));
    EXPECT_TRUE(has(complaint([&] { call(at::rand({4}, at::kComplexFloat)); }), "the tensor is undefined, complex"));
    EXPECT_TRUE(has(complaint([&] { call(at::Tensor()); }), "the tensor is undefined, complex"));
    call(at::rand({4}));
    call(at::rand({2, 3, 4}));
    call(at::rand({0, 4}));
  }
}

TEST(RunningStatisticsTest, StayDoubleInAModuleThatIsConverted) {
  run_ranks({2, "shm"}, [](Context& context) {
    struct Policy : torch::nn::Module {
      torch::nn::Linear layer{register_module("layer", torch::nn::Linear(3, 3))};
      RunningStatistics seen{register_module("seen", RunningStatistics(std::vector<int64_t>{3}))};
    } policy;
    policy.to(at::kHalf);
    policy.to(at::kCPU, at::kBFloat16);
    EXPECT_EQ(policy.layer->weight.scalar_type(), at::kBFloat16);
    for (const auto& [name, buffer] : policy.named_buffers().pairs())
      EXPECT_EQ(buffer.scalar_type(), name == "seen.count" ? at::kLong : at::kDouble) << name;
    RunningStatisticsImpl& seen = *policy.seen;
    seen.update(at::full({2, 3}, 1e6 + context.rank(), at::kDouble), context.group());
    EXPECT_TRUE(at::equal(seen.mean(), at::full({3}, 1e6 + 0.5, at::kDouble))) << seen.mean();
    seen.reset();
    EXPECT_EQ(seen.count(), 0);
    seen.update(at::full({1, 3}, 7.0), context.group());
    EXPECT_TRUE(at::equal(seen.mean(), at::full({3}, 7.0, at::kDouble))) << seen.mean();
  });
}

TEST(RunningStatisticsTest, StandInASequential) {
  run_ranks({2, "shm"}, [](Context& context) {
    RunningStatistics seen(std::vector<int64_t>{3});
    seen->update(at::full({4, 3}, 2.0 * context.rank()), context.group());
    torch::nn::Sequential policy(seen, torch::nn::Linear(3, 2));
    const at::Tensor x = at::full({5, 3}, 2.0);
    EXPECT_TRUE(at::equal(policy->forward(x), policy[1]->as<torch::nn::Linear>()->forward(seen->forward(x))));
    EXPECT_NEAR(seen->forward(x).max().item<double>(), 1, 1e-6);
  });
}

TEST(RunningStatisticsTest, AStateThatNoSamplesGiveIsRefused) {
  const std::pair<const char*, double> broken[] = {
      {"count", -3}, {"squares", -1}, {"squares", NAN}, {"mean", INFINITY}};
  for (const auto& [name, value] : broken)
    run_ranks({2, "shm"}, [&, name = name, value = value](Context& context) {
      RunningStatistics seen(std::vector<int64_t>{3});
      seen->update(at::rand({4, 3}), context.group());
      (void)seen(at::rand({3}));
      StateDict state = state_dict(*seen);
      if (context.rank() == 1) {
        state[name].fill_(value);
        load_state_dict(*seen, state);
        EXPECT_TRUE(has(complaint([&] { (void)seen(at::rand({3})); }), "it holds a state that no samples give"));
      }
      EXPECT_THROW(seen->update(at::rand({4, 3}), context.group()), Error);
      load_state_dict(*seen, state_dict(*RunningStatistics(std::vector<int64_t>{3})));
      seen->update(at::rand({4, 3}), context.group());
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
