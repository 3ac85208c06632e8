// Clipping, non-finite gradients, statistics and traces of DistributedDataParallel.

#include <cmath>
#include <fstream>
#include <limits>
#include <thread>

#include <gtest/gtest.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/observer.h>
#include <nlohmann/json.hpp>

#include "data_parallel/models.h"
#include "support/ranks.h"

namespace lockstep::equipment_test {
namespace {

using namespace testing;  // NOLINT
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Equipment : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, Equipment, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

std::vector<at::Tensor> gradients_of(Model& model) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : model.parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

/// LibTorch's clipping of copies of the model's gradients.
std::pair<double, std::vector<at::Tensor>> clipped_by_libtorch(Model& model, double max_norm, double norm_type) {
  std::vector<at::Tensor> parameters, gradients;
  for (const auto& gradient : gradients_of(model)) {
    if (!gradient.defined()) continue;
    parameters.push_back(at::empty_like(gradient).requires_grad_());
    parameters.back().mutable_grad() = gradient.clone();
  }
  const double norm = torch::nn::utils::clip_grad_norm_(parameters, max_norm, norm_type);
  for (const auto& parameter : parameters) gradients.push_back(parameter.grad());
  return {norm, gradients};
}

TEST_P(Equipment, ClipsAsLibTorchDoes) {
  run_ranks(GetParam(), [](Context& context) {
    for (const char* name : {"plain", "branches"})  // "branches" has parameters that no rank reaches
      for (const double bucket_mb : {25.0, 1e-4})
        for (const double norm_type : {2.0, 1.0, 3.5, kInfinity})
          for (const double max_norm : {1e-3, 1e3}) {
            auto model = make_model(name);
            DistributedDataParallel replica(model, context,
                                            {.first_bucket_cap_mb = bucket_mb, .bucket_cap_mb = bucket_mb});
            loss_of(*model, batch(0, context.rank()), 0, context.rank()).backward();
            const auto [norm, expected] = clipped_by_libtorch(*model, max_norm, norm_type);
            EXPECT_NEAR(replica.clip_grad_norm(max_norm, norm_type), norm, 1e-5 * norm);
            size_t i = 0;
            for (const auto& gradient : gradients_of(*model))
              if (gradient.defined()) {
                EXPECT_TRUE(at::allclose(gradient, expected[i], 1e-5, 1e-9)) << norm_type;
                ++i;
              }
            EXPECT_EQ(i, expected.size());
            EXPECT_GE(i, 2u);
          }
  });
}

TEST_P(Equipment, ClipsParametersThatAreNotReduced) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    model->parameters()[3].set_requires_grad(false);
    DistributedDataParallel replica(model, context);
    loss_of(*model, batch(0, 0), 0, 0).backward();
    model->parameters()[3].mutable_grad() = at::full({3}, 100.0f);
    const auto [norm, expected] = clipped_by_libtorch(*model, 1, 2);
    EXPECT_GT(norm, 100);
    EXPECT_NEAR(replica.clip_grad_norm(1), norm, 1e-5 * norm);
    for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(at::allclose(gradients_of(*model)[i], expected[i], 1e-5, 1e-9));
    EXPECT_THROW(replica.clip_grad_norm(1, 0), c10::Error);
  });
}

/// One backward in which the last rank's gradient of fc2.weight holds `value`.
void backward_with(Model& model, const Context& context, int step, double value) {
  const int rank = context.rank();
  auto& fc2 = dynamic_cast<Plain&>(model).fc2;
  const auto key = fc2->weight.register_hook([&](const at::Tensor& gradient) {
    at::Tensor changed = gradient.clone();
    if (rank == context.world_size() - 1) changed[1][2] = value;
    return changed;
  });
  struct Remove {
    at::Tensor tensor;
    unsigned key;
    ~Remove() { tensor.remove_hook(key); }
  } remove{fc2->weight, key};
  loss_of(model, batch(step, rank), step, rank).backward();
}

TEST_P(Equipment, SkipsNonFiniteStepsAlike) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context);
    replica.set_non_finite_policy(NonFinitePolicy::kSkip);
    auto optimizer = make_sgd(*model);
    for (const double value : {kInfinity, -kInfinity, std::nan("")}) {
      const at::Tensor before = model->parameters()[2].detach().clone();
      optimizer.zero_grad();
      backward_with(*model, context, 0, value);
      for (const auto& gradient : gradients_of(*model)) EXPECT_FALSE(gradient.defined());
      optimizer.step();
      EXPECT_TRUE(at::equal(model->parameters()[2].detach(), before));
    }
    EXPECT_EQ(replica.skipped_steps(), 3);
    // Large numbers whose sum overflows are still finite, and the next step counts.
    backward_with(*model, context, 1, 3e38);
    EXPECT_EQ(replica.skipped_steps(), 3);
    EXPECT_TRUE(gradients_of(*model)[0].defined());
  });
}

TEST_P(Equipment, RaisesNamingRankAndParameter) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context);
    replica.set_non_finite_policy(NonFinitePolicy::kRaise);
    const std::string expected =
        "rank " + std::to_string(context.world_size() - 1) + ": the gradient of fc2.weight is not finite (reduction 1)";
    try {
      backward_with(*model, context, 0, std::nan(""));
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()).substr(0, expected.size()), expected) << error.what();
    }
    backward_with(*model, context, 0, 1);  // and training goes on
    EXPECT_TRUE(at::isfinite(gradients_of(*model)[2]).all().item<bool>());
    replica.set_non_finite_policy(NonFinitePolicy::kIgnore);
    backward_with(*model, context, 0, kInfinity);
    EXPECT_FALSE(at::isfinite(gradients_of(*model)[2]).all().item<bool>());
  });
}

TEST_P(Equipment, StatsNameTheLateRank) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;  // there is nothing to reduce; see below
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
    replica.set_rank_comparison(true);
    const int late = context.world_size() - 1;
    for (int step = 0; step < 4; ++step) {
      const at::Tensor loss = loss_of(*model, batch(step, context.rank()), step, context.rank());
      if (context.rank() == late) std::this_thread::sleep_for(std::chrono::milliseconds(60));
      loss.backward();
    }
    const ReductionStats stats = replica.stats();
    EXPECT_EQ(stats.reductions, 4);
    ASSERT_EQ(stats.buckets.size(), replica.bucket_parameters().size());
    EXPECT_GE(stats.buckets.size(), 3u);
    int64_t bytes = 0;
    for (size_t b = 0; b < stats.buckets.size(); ++b) {
      const BucketStats& bucket = stats.buckets[b];
      EXPECT_EQ(bucket.parameters, replica.bucket_parameters()[b]);
      EXPECT_LE(0, bucket.ready_ms);
      EXPECT_LE(bucket.ready_ms, bucket.start_ms);
      EXPECT_LE(bucket.start_ms, bucket.end_ms);
      EXPECT_LE(0, bucket.wait_ms);
      EXPECT_LE(bucket.end_ms, stats.buckets.back().end_ms);
      bytes += bucket.bytes;
    }
    EXPECT_EQ(stats.bytes, bytes);
    EXPECT_GE(bytes, 83 * 4);  // 6 x 8 + 8 + 8 x 3 + 3 parameters
    EXPECT_LE(stats.wait_ms, stats.backward_ms);
    ASSERT_EQ(stats.wait_ms_by_rank.size(), static_cast<size_t>(context.world_size()));
    EXPECT_GT(stats.wait_ms_by_rank[0], 30);
    EXPECT_EQ(stats.times_last_by_rank[static_cast<size_t>(late)], 4);
    EXPECT_EQ(stats.reason.rfind("rank " + std::to_string(late) + " came last in 4 of 4 reductions", 0), 0u)
        << stats.reason;
  });
}

TEST_P(Equipment, ATraceHoldsEverySpan) {
  run_ranks(GetParam(), [](Context& context) {
    const std::string path = ::testing::TempDir() + "trace_" + std::to_string(getpid()) + ".json";
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
    replica.set_observer(chrome_trace(path, context.rank()));
    for (int step = 0; step < 3; ++step) loss_of(*model, batch(step, context.rank()), step, context.rank()).backward();
    const size_t buckets = replica.bucket_parameters().size();
    replica.set_observer(nullptr);  // closes the file
    std::ifstream file(path);
    const auto events = nlohmann::json::parse(file);
    size_t backwards = 0, reductions = 0;
    for (const auto& event : events) {
      EXPECT_EQ(event["pid"], context.rank());
      if (event["ph"] != "X") continue;
      EXPECT_GE(event["dur"].get<double>(), 0);
      backwards += event["name"] == "backward";
      reductions += event["name"].get<std::string>().starts_with("bucket ");
    }
    EXPECT_EQ(backwards, context.world_size() == 1 ? 0u : 3u);
    EXPECT_EQ(reductions, 3 * buckets);
    std::remove(path.c_str());
    EXPECT_THROW(chrome_trace("/nowhere/trace.json", 0), Error);
  });
}

}  // namespace
}  // namespace lockstep::equipment_test
