#include <gtest/gtest.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <lockstep/distributed_data_parallel.h>

#include "support/ranks.h"

// A model of many small parameters, whose gradients are copied into their bucket several at a time. Expected: closed
// forms.

namespace lockstep::small_parameters_test {
namespace {

using namespace testing;  // NOLINT

class SmallParameters : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, SmallParameters, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

constexpr int64_t kParameters = 150;
constexpr int64_t kLarge = 70;  ///< the one whose gradient is copied at once

int64_t elements_of(int64_t parameter) { return parameter == kLarge ? 4096 : 8; }
double input_of(int rank) { return 1.0 + rank; }

/// The gradient of parameter i is (i + 1) times the input, in every element.
struct Many : torch::nn::Module {
  Many() {
    for (int64_t i = 0; i < kParameters; ++i)
      scales.push_back(register_parameter("scale" + std::to_string(i), at::ones({elements_of(i)}, at::kDouble)));
  }
  /// Uses the parameters from `first` on. The gradients of those after `fails_at` are computed before its backward
  /// fails.
  at::Tensor forward(double input, int64_t first = 0, std::optional<int64_t> fails_at = std::nullopt) {
    at::Tensor sum = at::zeros({}, at::kDouble);
    for (int64_t i = first; i < kParameters; ++i) {
      sum = sum + (scales[static_cast<size_t>(i)] * input * static_cast<double>(i + 1)).sum();
      if (fails_at == i)
        sum.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("on purpose"); });
    }
    return sum;
  }
  std::vector<at::Tensor> scales;
};

/// `factor(i)`: the expected gradient of parameter i over (i + 1); 0: it has none.
template <typename Factor>
void expect_gradients(const Many& model, const Factor& factor) {
  for (int64_t i = 0; i < kParameters; ++i) {
    const at::Tensor& gradient = model.scales[static_cast<size_t>(i)].grad();
    const double expected = factor(i) * static_cast<double>(i + 1);
    ASSERT_EQ(gradient.defined(), expected != 0) << "parameter " << i;
    if (gradient.defined()) {
      ASSERT_TRUE(at::allclose(gradient, at::full({elements_of(i)}, expected, at::kDouble), 1e-12))
          << "parameter " << i << "\n"
          << gradient << "\nexpected " << expected;
    }
  }
}

double mean_input(int world_size, int first_rank = 0) {
  double sum = 0;
  for (int rank = first_rank; rank < world_size; ++rank) sum += input_of(rank);
  return sum / world_size;
}

TEST_P(SmallParameters, HaveTheMeanOverTheRanks) {
  run_ranks(GetParam(), [](Context& context) {
    for (const double cap_mb : {25.0, 1e-3}) {  // one bucket; buckets of 16 parameters
      auto model = std::make_shared<Many>();
      DistributedDataParallel replica(model, context, {.first_bucket_cap_mb = cap_mb, .bucket_cap_mb = cap_mb});
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        replica(input_of(context.rank())).backward();
        expect_gradients(*model, [&](int64_t) { return mean_input(context.world_size()); });
      }
    }
  });
}

TEST_P(SmallParameters, ThatSomeRanksDoNotUseCountAsZerosThere) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = std::make_shared<Many>();
    DistributedDataParallel replica(model, context);
    for (const int64_t first : {40, 0, 110}) {
      model->zero_grad();
      replica(input_of(context.rank()), context.rank() == 0 ? first : 0).backward();
      expect_gradients(*model, [&](int64_t i) { return mean_input(context.world_size(), i < first ? 1 : 0); });
    }
  });
}

TEST_P(SmallParameters, AddUpOverSeveralPasses) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = std::make_shared<Many>();
    DistributedDataParallel replica(model, context);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      for (int pass = 0; pass < 3; ++pass) {
        std::optional<NoSyncGuard> local;
        if (pass < 2) local = replica.no_sync();
        replica(input_of(context.rank())).backward();
      }
      expect_gradients(*model, [&](int64_t) { return 3 * mean_input(context.world_size()); });
    }
  });
}

/// What a failed backward has computed is in .grad, whether or not it had been copied.
TEST_P(SmallParameters, OfABackwardThatFailed) {
  run_ranks(GetParam(), [](Context& context) {
    constexpr int64_t kFailsAt = 95;
    auto model = std::make_shared<Many>();
    DistributedDataParallel replica(model, context);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      {
        const auto local = replica.no_sync();
        const at::Tensor loss = replica(input_of(context.rank()), 0, kFailsAt);
        EXPECT_THROW(loss.backward(), std::runtime_error);
      }
      replica.reduce_gradients();
      expect_gradients(*model, [&](int64_t i) { return i > kFailsAt ? mean_input(context.world_size()) : 0; });
      model->zero_grad();
      replica(input_of(context.rank())).backward();
      expect_gradients(*model, [&](int64_t) { return mean_input(context.world_size()); });
    }
  });
}

/// The replica runs the hooks of a tensor together with its own, and leaves them when it goes.
TEST_P(SmallParameters, KeepTheirHooks) {
  run_ranks(GetParam(), [](Context& context) {
    auto model = std::make_shared<Many>();
    const auto times = [](double factor) { return [factor](const at::Tensor& gradient) { return gradient * factor; }; };
    model->scales[3].register_hook(times(2));
    double local_input = input_of(context.rank());
    {
      DistributedDataParallel replica(model, context);
      const unsigned second = model->scales[3].register_hook(times(5));
      model->scales[4].register_hook(times(3));
      replica(local_input).backward();
      expect_gradients(*model, [&](int64_t i) {
        return mean_input(context.world_size()) * (i == 3 ? 10 : i == 4 ? 3 : 1);
      });
      model->scales[3].remove_hook(second);
    }
    model->zero_grad();
    model->forward(local_input).backward();
    expect_gradients(*model, [&](int64_t i) { return local_input * (i == 3 ? 2 : i == 4 ? 3 : 1); });
  });
}

}  // namespace
}  // namespace lockstep::small_parameters_test
