#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <ATen/autocast_mode.h>
#include <torch/optim.h>

#include <lockstep/autocast.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>

#include "checkpoint/failure.h"
#include "data_parallel/models.h"
#include "support/ranks.h"

// autocast, and GradScaler against PyTorch's; tests/golden/write_training_golden.py has the other side.

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

at::ScalarType dtype_of_product() { return at::mm(at::ones({2, 2}), at::ones({2, 2})).scalar_type(); }

TEST(Autocast, GuardsNestAndLeaveThingsAsTheyWere) {
  EXPECT_EQ(dtype_of_product(), at::kFloat);
  {
    const auto outer = autocast();
    EXPECT_EQ(dtype_of_product(), at::kBFloat16);
    {
      const auto off = autocast({.enabled = false});
      EXPECT_EQ(dtype_of_product(), at::kFloat);
      const auto half = autocast({.dtype = at::kHalf});
      EXPECT_EQ(dtype_of_product(), at::kHalf);
    }
    EXPECT_EQ(dtype_of_product(), at::kBFloat16);
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kHalf);
    const auto cuda = autocast({.device = at::kCUDA, .dtype = at::kBFloat16});
    EXPECT_TRUE(at::autocast::is_autocast_enabled(at::kCUDA));
    EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kBFloat16);
  }
  EXPECT_EQ(dtype_of_product(), at::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCUDA));
  EXPECT_EQ(at::autocast::get_autocast_dtype(at::kCUDA), at::kHalf);
  EXPECT_THROW(autocast({.dtype = at::kFloat}), c10::Error);
  EXPECT_THROW(autocast({.device = at::kMeta}), c10::Error);
  EXPECT_EQ(dtype_of_product(), at::kFloat);
}

/// A cast that outlived its guard would hide what the optimizer did to the weight.
TEST(Autocast, TheOutermostGuardDropsTheCasts) {
  at::Tensor weight = at::ones({2, 2}).requires_grad_();
  const auto product = [&] { return at::mm(at::ones({2, 2}), weight)[0][0].item<float>(); };
  {
    const auto outer = autocast();
    {
      const auto inner = autocast();
      EXPECT_EQ(product(), 2);
    }
    weight.mutable_data_ptr<float>()[0] = 5;  // behind the cache's back
    EXPECT_EQ(product(), 2);
  }
  const auto again = autocast();
  EXPECT_EQ(product(), 6);
}

StateDict gradients_of(torch::nn::Module& module) {
  StateDict gradients;
  for (const auto& item : module.named_parameters()) gradients.insert(item.key(), item.value().grad().clone());
  return gradients;
}

TEST(Autocast, UnderDistributedDataParallelGradientsAreThoseOfOneProcess) {
  for (const int ranks : {1, 2, 3})
    run_ranks(ranks, [](Context& context) {
      auto model = make_model("plain"), alone = make_model("plain"), exact = make_model("plain");
      DistributedDataParallel replica(model, context);
      at::Tensor loss, whole;
      {
        const auto bf16 = autocast();
        const at::Tensor output = replica(batch(0, context.rank()).data, 0, 0);
        EXPECT_EQ(output.scalar_type(), at::kBFloat16);
        loss = at::mse_loss(output.to(at::kFloat), batch(0, context.rank()).target);
        for (int rank = 0; rank < context.world_size(); ++rank) {
          const at::Tensor part =
              at::mse_loss(alone->forward(batch(0, rank).data, 0, 0).to(at::kFloat), batch(0, rank).target) /
              context.world_size();
          whole = whole.defined() ? whole + part : part;
        }
      }
      loss.backward();
      whole.backward();
      for (int rank = 0; rank < context.world_size(); ++rank)
        (loss_of(*exact, batch(0, rank), 0, 0) / context.world_size()).backward();
      const StateDict expected = gradients_of(*alone), in_float = gradients_of(*exact);
      for (const auto& item : gradients_of(*model)) {
        EXPECT_EQ(item.value().scalar_type(), at::kFloat) << item.key();
        // In one process the gradients of a weight's uses are added in bfloat16, 3 digits, before they become float.
        const double largest = expected[item.key()].abs().max().item<double>();
        EXPECT_LE((item.value() - expected[item.key()]).abs().max().item<double>(), 0.01 * largest) << item.key();
        EXPECT_LE((item.value() - in_float[item.key()]).abs().max().item<double>(), 0.03 * largest) << item.key();
        EXPECT_FALSE(at::equal(item.value(), in_float[item.key()])) << item.key() << " was not computed in bfloat16";
      }
    });
}

constexpr GradScalerOptions kOptions{
    .init_scale = 1000, .growth_factor = 1.7, .backoff_factor = 0.3, .growth_interval = 3};

int64_t tracker_of(const GradScaler& scaler) {
  return scaler.state_dict().toGenericDict().at("_growth_tracker").toInt();
}

TEST(GradScalerTest, StepsSkipsAndScalesAsPyTorchDoes) {
  const StateDict golden =
      without_prefix("scaler/", load(LOCKSTEP_SOURCE_DIR "/tests/golden/training.safetensors").tensors);
  at::Tensor parameter = formula({5}, 1).to(at::kFloat).requires_grad_();
  torch::optim::SGD optimizer({parameter}, torch::optim::SGDOptions(0.1).momentum(0.9));
  GradScaler scaler(kOptions);
  int skipped = 0;
  for (int step = 0; step < 30; ++step) {
    optimizer.zero_grad();
    scaler.scale((parameter * formula({5}, step + 0.25).to(at::kFloat)).sum()).backward();
    if (step == 4 || step == 5 || step == 13 || step == 29)
      parameter.grad()[2] = step % 2 ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    if (step % 3 == 0) scaler.unscale(optimizer);  // makes no difference
    skipped += scaler.step(optimizer) ? 0 : 1;
    scaler.update();
    ASSERT_TRUE(at::allclose(parameter, golden["weights"][step], 1e-6, 1e-7)) << "step " << step;
    ASSERT_EQ(scaler.get_scale(), golden["scale"][step].item<double>()) << "step " << step;
    ASSERT_EQ(tracker_of(scaler), golden["tracker"][step].item<int64_t>()) << "step " << step;
  }
  EXPECT_EQ(skipped, 4);
}

TEST(GradScalerTest, KeepsItsStateAndRefusesAnother) {
  at::Tensor parameter = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer({parameter}, 0.1);
  GradScaler scaler(kOptions), other;
  for (int step = 0; step < 5; ++step) {
    scaler.scale(parameter.sum()).backward();
    EXPECT_TRUE(scaler.step(optimizer));
    scaler.update();
    optimizer.zero_grad();
  }
  other.load_state_dict(scaler.state_dict());
  EXPECT_EQ(other.get_scale(), static_cast<float>(1000 * 1.7));
  EXPECT_EQ(tracker_of(other), 2);
  auto broken = scaler.state_dict().toGenericDict().copy();
  EXPECT_EQ(broken.erase("growth_factor"), 1u);
  EXPECT_NE(failure([&] { other.load_state_dict(broken); }).find("growth_factor"), std::string::npos);
  GradScaler off({.enabled = false});
  EXPECT_EQ(off.state_dict().toGenericDict().size(), 0u);
  EXPECT_NE(failure([&] { other.load_state_dict(off.state_dict()); }).find("not enabled"), std::string::npos);
  EXPECT_TRUE(off.step(optimizer));
  EXPECT_EQ(off.get_scale(), 1);
}

TEST(GradScalerTest, RefusesCallsThatMakeNoSense) {
  at::Tensor parameter = at::ones({2}).requires_grad_(), half = at::ones({2}, at::kHalf).requires_grad_();
  torch::optim::SGD optimizer({parameter}, 0.1), of_half({half}, 0.1);
  GradScaler scaler;
  EXPECT_THROW(scaler.update(), c10::Error);
  EXPECT_THROW(scaler.step(optimizer), c10::Error);  // no gradient
  scaler.scale(parameter.sum()).backward();
  half.mutable_grad() = at::ones({2}, at::kHalf);
  scaler.unscale(optimizer);
  EXPECT_THROW(scaler.unscale(optimizer), c10::Error);
  scaler.step(optimizer);
  EXPECT_THROW(scaler.step(optimizer), c10::Error);
  EXPECT_THROW(scaler.unscale(of_half), c10::Error);
  scaler.update(8.0);
  EXPECT_EQ(scaler.get_scale(), 8);
  EXPECT_THROW(scaler.unscale(optimizer), Error);  // scaled by nobody knows what
}

/// An overflow on rank 1 alone, in gradients that nobody averages: only the scaler's own message can tell.
TEST(GradScalerTest, AnOverflowOnOneRankMakesAllRanksSkip) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}})
    run_ranks(engine, [](Context& context) {
      at::Tensor parameter = at::ones({4}).requires_grad_();
      torch::optim::SGD optimizer({parameter}, 0.1);
      GradScaler scaler(context.group());
      std::string steps;
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        scaler.scale(parameter.sum()).backward();
        if (context.rank() == 1 && step == 3) parameter.grad()[0] = std::numeric_limits<float>::infinity();
        steps += scaler.step(optimizer) ? 's' : '-';
        scaler.update();
      }
      EXPECT_EQ(steps, "sss-ss");
      EXPECT_EQ(scaler.get_scale(), 32768);
      EXPECT_TRUE(at::allclose(parameter, at::full({4}, 0.5f)));
    });
}

TEST(GradScalerTest, RefusesScalesThatDifferByRankOrAreNoFloats) {
  for (const double scale : {1e300, 1e-60, 0.0, -1.0, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THROW(GradScaler({.init_scale = scale}), c10::Error) << scale;
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}})
    run_ranks(engine.world_size,
              [](Context& context) {
                const at::Tensor weight = at::ones({2}).requires_grad_();
                torch::optim::SGD optimizer({weight}, 0.1);
                GradScaler scaler(context.group(), {.init_scale = context.rank() == 1 ? 256.0 : 65536.0});
                scaler.scale(weight.sum()).backward();
                try {
                  scaler.step(optimizer);
                  ADD_FAILURE() << "it stepped";
                } catch (const Error& error) {
                  EXPECT_NE(std::string(error.what()).find("the ranks have different scales, from 256 to 65536"),
                            std::string::npos)
                      << error.what();
                }
                EXPECT_TRUE(weight.equal(at::ones({2})));
              },
              std::chrono::seconds(20), {.backend = engine.backend, .announce = false});
}

const std::vector<Engine> kSeveral{{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};

/// What the scaler's step throws where the last rank ran backward without scale().
std::string said_of_unscaled(const std::function<bool()>& step) {
  try {
    step();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string expected_of_unscaled(int world_size) {
  return "GradScaler: rank " + std::to_string(world_size - 1) +
         " ran backward without scale() since the last update(), and " + (world_size == 2 ? "rank 0" : "ranks 0, 1") +
         " with it, so the gradients have different scales.";
}

TEST(GradScalerTest, NamesARankThatHasNotScaled) {
  for (const Engine& engine : kSeveral)
    for (const bool replicated : {true, false})
      run_ranks(engine, [&](Context& context) {
        auto model = make_model("plain");
        std::optional<decltype(DistributedDataParallel(model, context))> replica;
        if (replicated) replica.emplace(model, context);
        auto optimizer = make_sgd(*model);
        GradScaler scaler(context.group(), {.init_scale = 1024});
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          const at::Tensor loss = loss_of(*model, batch(step, context.rank()), 0, 0);
          const bool forgets = step == 2 && context.rank() == context.world_size() - 1;
          (forgets ? loss : scaler.scale(loss)).backward();
          const std::string text = said_of_unscaled([&] { return scaler.step(optimizer); });
          EXPECT_EQ(text.substr(0, text.find(" Call scaler.scale")),
                    step < 2 ? "" : expected_of_unscaled(context.world_size()));
          if (step < 2) scaler.update();
        }
      });
}

/// All of these are right, though not every rank calls scale() equally often.
TEST(GradScalerTest, LetsRanksWithoutABackwardBe) {
  for (const Engine& engine : kSeveral)
    run_ranks(engine, [](Context& context) {
      auto model = make_model("plain");
      DistributedDataParallel replica(model, context);
      auto optimizer = make_sgd(*model);
      GradScaler scaler(context.group(), {.init_scale = 1024});
      const bool last = context.rank() == context.world_size() - 1;
      const auto loss = [&](int step) { return loss_of(*model, batch(step, context.rank()), 0, 0); };
      const auto end_step = [&] {
        scaler.step(optimizer);
        scaler.update();
        optimizer.zero_grad();
      };
      last ? replica.skip_step() : scaler.scale(loss(0)).backward();
      end_step();
      for (int pass = 0; pass < 2; ++pass) {
        const auto accumulation = replica.no_sync();
        scaler.scale(loss(1)).backward();
      }
      replica.reduce_gradients();
      end_step();
      replica.join(
          [&] {
            for (int step = 0; step < (last ? 1 : 3); ++step) {
              scaler.scale(loss(step)).backward();
              end_step();
            }
          },
          {.shadow = end_step});
      // Without a replica, where zero_grad() has left zeros on a rank without a backward.
      const at::Tensor weight = at::ones({2}).requires_grad_();
      torch::optim::SGD own({weight}, 0.1);
      scaler.scale(weight.sum()).backward();
      own.zero_grad(/*set_to_none=*/false);
      scaler.step(own);
      scaler.update();
      if (!last) scaler.scale(weight.sum()).backward();
      EXPECT_TRUE(scaler.step(own));
    });
}

TEST(GradScalerTest, WorksWithDistributedDataParallelAndClipping) {
  run_ranks(3, [](Context& context) {
    auto model = make_model("plain"), plain = make_model("plain");
    DistributedDataParallel replica(model, context);
    DistributedDataParallel other(plain, context);
    auto optimizer = make_sgd(*model), expected = make_sgd(*plain);
    GradScaler scaler(context.group(), {.init_scale = 1024});
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      expected.zero_grad();
      const Sample sample = batch(step, context.rank());
      const bool overflows = step == 5;
      scaler
          .scale(loss_of(*model, sample, 0, 0) *
                 (overflows && context.rank() == 2 ? std::numeric_limits<float>::infinity() : 1))
          .backward();
      scaler.unscale(optimizer);
      replica.clip_grad_norm(0.1);
      EXPECT_EQ(scaler.step(optimizer), !overflows);
      scaler.update();
      loss_of(*plain, sample, 0, 0).backward();
      other.clip_grad_norm(0.1);
      if (!overflows) expected.step();
    }
    EXPECT_EQ(scaler.get_scale(), 512);
    for (const auto& item : state_dict(*model))
      EXPECT_TRUE(at::allclose(item.value(), state_dict(*plain)[item.key()], 1e-5, 1e-6)) << item.key();
  });
}

/// The policy takes the gradients away on all ranks; a scaler that saw nothing would never lower its scale.
TEST(GradScalerTest, SaysThatThePolicyHasTakenTheGradients) {
  run_ranks(2, [](Context& context) {
    auto model = make_model("plain");
    DistributedDataParallel replica(model, context);
    replica.set_non_finite_policy(NonFinitePolicy::kSkip);
    auto optimizer = make_sgd(*model);
    GradScaler scaler(context.group());
    scaler.scale(loss_of(*model, batch(0, context.rank()), 0, 0) * std::numeric_limits<float>::infinity()).backward();
    EXPECT_THROW(scaler.step(optimizer), Error);
  });
}

}  // namespace
}  // namespace lockstep
