#include <gtest/gtest.h>
#include <torch/torch.h>

#include <future>
#include <thread>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "base/clock.h"
#include "support/ranks.h"

// Two threads of a rank that meet in one model: the mean of what both have computed, or an error on all ranks.

namespace lockstep::two_threads_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::RMSprop;
using torch::optim::SGD;

class TwoThreads : public ::testing::TestWithParam<Engine> {
 protected:
  static void on_ranks(const std::function<void(Context&)>& body) {
    run_ranks(GetParam().world_size, body, std::chrono::seconds(30),
              {.collective_timeout = std::chrono::seconds(25), .backend = GetParam().backend, .announce = false});
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, TwoThreads,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& one) { return name_of(one.param); });

/// The text of what `body` throws, within five seconds.
std::string error_of(const std::function<void()>& body) {
  const auto start = Clock::now();
  std::string text;
  try {
    body();
  } catch (const c10::Error& error) {
    text = error.what_without_backtrace();
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_LT(seconds_since(start), 5);
  return text;
}

#define EXPECT_IN(part, text) EXPECT_NE((text).find(part), std::string::npos) << (text)

void pause(int milliseconds) { std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds)); }

using Linear = torch::nn::Linear;

Linear made() {
  Linear net(4, 3);
  const at::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(0.5);
  return net;
}

at::Tensor input(double value) { return at::full({2, 4}, value); }

/// The gradients of the weights if the inputs of all ranks and both threads are 1 + rank and 10 * (1 + rank).
double mean_of_both(const Context& context) { return 2 * 11 * (context.world_size() + 1) / 2.0; }

/// The thread of this function runs a backward, and another one, whose first gradient comes only when this one waits
/// for the last rank, or is done.
void run_both(Context& context, Linear& net) {
  const bool late = context.rank() == context.world_size() - 1;
  std::promise<void> done;
  std::string text;
  std::thread other([&] {
    at::Tensor out = net(input(10 * (1 + context.rank())));
    out.register_hook([&](const at::Tensor&) {
      pause(late ? 0 : 200);
      if (late) done.get_future().wait();
    });
    text = error_of([&] { out.sum().backward(); });
  });
  at::Tensor out = net(input(1 + context.rank()));
  if (late) pause(500);
  EXPECT_EQ(error_of([&] { out.sum().backward(); }), "");
  done.set_value();
  other.join();
  EXPECT_EQ(text, "");
}

TEST_P(TwoThreads, WhoComesWhileTheOtherWaitsIsAdded) {
  on_ranks([](Context& context) {
    Linear net = made();
    DistributedDataParallel model(net, context);
    for (int step = 0; step < 2; ++step) {
      net->zero_grad();
      run_both(context, net);
      EXPECT_TRUE(at::allclose(net->weight.grad(), at::full({3, 4}, mean_of_both(context)))) << net->weight.grad();
    }
  });
}

template <typename Optimizer, typename Options>
void expect_steps_of_both(Context& context, const Options& options) {
  Linear net = made(), expected = made();
  DistributedDataParallel model(net, context);
  ZeroRedundancyOptimizer<Optimizer> optimizer(model, options);
  Optimizer own(expected->parameters(), options);
  for (int step = 0; step < 2; ++step) {
    net->zero_grad();
    run_both(context, net);
    optimizer.step();
    expected->weight.mutable_grad() = at::full({3, 4}, mean_of_both(context));
    expected->bias.mutable_grad() = at::full({3}, 4.0);
    own.step();
    EXPECT_TRUE(at::allclose(net->weight, expected->weight)) << net->weight;
    EXPECT_TRUE(at::allclose(net->bias, expected->bias)) << net->bias;
  }
}

TEST_P(TwoThreads, AShardedStepTakesTheSumOfBoth) {
  on_ranks([](Context& context) {
    expect_steps_of_both<SGD>(context, torch::optim::SGDOptions(0.1));
    expect_steps_of_both<RMSprop>(context, torch::optim::RMSpropOptions(0.1));
  });
}

struct TwoLayers : torch::nn::Module {
  Linear first{register_module("first", Linear(4, 4))}, second{register_module("second", Linear(4, 2))};
};

/// One thread has reached the last layer while the other is in its backward, and reaches the first when that has ended.
template <typename Optimizer, typename Options>
void expect_named(Context& context, const Options& options) {
  auto net = std::make_shared<TwoLayers>();
  DistributedDataParallel model(net, context);
  ZeroRedundancyOptimizer<Optimizer> optimizer(model, options);
  std::promise<void> began, reached, ended;
  std::thread other([&] {
    at::Tensor middle = net->first(input(2));
    const at::Tensor out = net->second(middle);
    middle.register_hook([&](const at::Tensor&) {
      reached.set_value();
      ended.get_future().wait();
    });
    began.get_future().wait();
    EXPECT_EQ(error_of([&] { out.sum().backward(); }), "");
  });
  at::Tensor middle = net->first(input(1));
  middle.register_hook([&](const at::Tensor&) {
    began.set_value();
    reached.get_future().wait();
  });
  std::string text = error_of([&] { net->second(middle).sum().backward(); });  // where backward reduces
  ended.set_value();
  other.join();
  text += error_of([&] { optimizer.step(); });
  EXPECT_IN("was reached by the backward of one thread while that of another was still running", text);
}

TEST_P(TwoThreads, WhoComesBeforeTheOtherIsDoneIsNamed) {
  on_ranks([](Context& context) {
    expect_named<SGD>(context, torch::optim::SGDOptions(0.1));
    expect_named<RMSprop>(context, torch::optim::RMSpropOptions(0.1));
  });
}

constexpr const char* kBeside = "a thread ran a backward of a model while another was between settling and stepping";

TEST_P(TwoThreads, AStepBesideABackwardIsRefused) {
  on_ranks([](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    auto net = std::make_shared<TwoLayers>();
    DistributedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, torch::optim::SGDOptions(0.1));
    net->second(net->first(input(1))).sum().backward();
    std::promise<void> reached, ended;
    std::thread other([&] {
      if (!odd) return reached.set_value();
      at::Tensor middle = net->first(input(2));
      middle.register_hook([&](const at::Tensor&) {
        reached.set_value();
        ended.get_future().wait();
      });
      error_of([&] { net->second(middle).sum().backward(); });
    });
    reached.get_future().wait();
    EXPECT_IN(kBeside, error_of([&] { optimizer.step(); }));
    ended.set_value();
    other.join();
  });
}

template <typename Optimizer, typename Options>
void expect_backward_refused(Context& context, const Options& options) {
  const bool late = context.rank() == context.world_size() - 1;
  Linear net = made();
  DistributedDataParallel model(net, context);
  ZeroRedundancyOptimizer<Optimizer> optimizer(model, options);
  net(input(1)).sum().backward();
  std::string text;
  std::thread other([&] {
    if (late) return;
    const at::Tensor loss = net(input(2)).sum();
    pause(200);
    text = error_of([&] { loss.backward(); });
  });
  if (late) pause(500);
  EXPECT_EQ(error_of([&] { optimizer.step(); }), "");
  other.join();
  if (!late) {
    EXPECT_IN(kBeside, text);
  }
  EXPECT_IN(kBeside, error_of([&] {
              net(input(1)).sum().backward();
              optimizer.step();
            }));
}

TEST_P(TwoThreads, ABackwardBesideAStepIsRefused) {
  on_ranks([](Context& context) {
    expect_backward_refused<SGD>(context, torch::optim::SGDOptions(0.1));
    expect_backward_refused<RMSprop>(context, torch::optim::RMSpropOptions(0.1));
  });
}

}  // namespace
}  // namespace lockstep::two_threads_test
