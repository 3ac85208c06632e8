#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/failure.h"
#include "support/ranks.h"

// check_divergence_every() beside buffers, with the optimizer of each rank and with one that ranks share.

namespace lockstep::divergence_test {
namespace {

using namespace testing;  // NOLINT

struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return out(norm(in((x - mean) / 2))); }
  /// Outside of forward, as what normalises observations does it.
  void observe(double value) { mean.mul_(0.9).add_(0.1 * value); }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(4, 6))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(6))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(6, 2))};
  at::Tensor mean = register_buffer("mean", at::zeros({4}));
};
TORCH_MODULE(Net);

at::Tensor input(const Context& context, int step) {
  return torch::sin(torch::arange(32, torch::kFloat).view({8, 4}) * (context.rank() + 1.5) + step);
}

class Divergence : public ::testing::TestWithParam<std::tuple<Engine, bool>> {
 protected:
  using Loop = std::function<void(Context& context, Net& net, DistributedDataParallel<Net>& model,
                                  const std::function<void()>& step)>;
  static void on_ranks(const Loop& loop) {
    const auto& [engine, sharded] = GetParam();
    run_ranks(engine.world_size,
              [&, sharded = sharded](Context& context) {
                Net net;
                DistributedDataParallel model(net, context);
                if (sharded) {
                  ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-2));
                  loop(context, net, model, [&] { optimizer.step(), net->zero_grad(); });
                } else {
                  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
                  loop(context, net, model, [&] { optimizer.step(), net->zero_grad(); });
                }
              },
              std::chrono::seconds(30), {.backend = engine.backend, .announce = false});
  }
};
INSTANTIATE_TEST_SUITE_P(
    Engines, Divergence,
    ::testing::Combine(::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                       ::testing::Bool()),
    [](const auto& one) { return name_of(std::get<0>(one.param)) + (std::get<1>(one.param) ? "_sharded" : "_own"); });

TEST_P(Divergence, OfBatchNormIsNone) {
  on_ranks([](Context& context, Net&, auto& model, const auto& step) {
    for (const bool as_left : {false, true}) {
      model.check_divergence_every(1, {.buffers_as_left = as_left});
      for (int i = 0; i < 3; ++i) {
        EXPECT_EQ(failure([&] {
                    model(input(context, i)).square().mean().backward();
                    step();
                  }),
                  "");
      }
    }
  });
}

TEST_P(Divergence, OfABufferIsSeenBeforeItFollowsRankZero) {
  on_ranks([](Context& context, Net& net, auto& model, const auto& step) {
    const bool odd = context.rank() == context.world_size() - 1;
    const auto train = [&](bool apart) {
      return failure([&] {
        for (int i = 0; i < 3; ++i) {
          net->observe(apart && odd ? 2 : 1);
          model(input(context, i)).square().mean().backward();
          step();
        }
      });
    };
    model.check_divergence_every(1, {.buffers_as_left = true});
    EXPECT_EQ(train(false), "");
    const std::string text = train(true);
    EXPECT_NE(text.find("the replicas have diverged: buffer mean on rank " + std::to_string(context.world_size() - 1) +
                        " differs from that on rank"),
              std::string::npos)
        << text;
  });
}

TEST_P(Divergence, OfARollbackIsNone) {
  on_ranks([](Context& context, Net& net, auto& model, const auto& step) {
    StateDict before = state_dict(*net);
    StateDict kept;
    for (const auto& item : before) kept.insert(item.key(), item.value().clone());
    const auto backward = [&](int i) { model(input(context, i)).square().mean().backward(); };
    backward(0), step();
    for (const bool loads : {true, false}) {
      backward(1);  // a loss that is no number, say
      loads ? static_cast<void>(load_state_dict(*net, kept)) : model.broadcast_parameters();
      net->zero_grad();
      EXPECT_EQ(failure([&] { backward(2), step(); }), "");
    }
    model.check_divergence();
  });
}

}  // namespace
}  // namespace lockstep::divergence_test
