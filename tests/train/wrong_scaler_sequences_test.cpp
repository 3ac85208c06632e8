#include <gtest/gtest.h>

#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <torch/torch.h>

#include <lockstep/checkpoint.h>

#include "checkpoint/failure.h"
#include "train/scaler_side.h"

// Calls of a GradScaler in an order in which gradients are divided by a scale that they do not have, twice, or never.
// Beside them PyTorch's recipes with several losses and optimizers, which are right.

namespace lockstep::wrong_scaler_sequences_test {
namespace {

using namespace testing;             // NOLINT
using namespace wrong_scalers_test;  // NOLINT

constexpr float kInfinity = std::numeric_limits<float>::infinity();

static_assert(!std::is_copy_constructible_v<GradScaler> && !std::is_copy_assignable_v<GradScaler>);

/// One replica of a discriminator and a generator, as a GAN has them.
struct Pair {
  explicit Pair(Context& context) : replica(all(), context) {}
  NamedTensors all() const {
    NamedTensors named;
    for (const auto& one : d->named_parameters()) named.emplace_back("d." + one.key(), one.value());
    for (const auto& one : g->named_parameters()) named.emplace_back("g." + one.key(), one.value());
    return named;
  }
  at::Tensor fake(int step) { return torch::tanh(g->forward(at::full({4, 3}, 0.1 * (step + 1)))); }
  at::Tensor loss_of_d(int step) { return d->forward(fake(step).detach()).square().mean(); }
  at::Tensor loss_of_g(int step) { return (d->forward(fake(step)) - 1).square().mean(); }

  torch::nn::Linear d{3, 1}, g{3, 3};
  DistributedDataParallel<NamedTensors> replica;
  torch::optim::SGD of_d{d->parameters(), 0.1}, of_g{g->parameters(), 0.1};
};

/// Gradients that no reducer follows, alike on all ranks.
struct Own {
  at::Tensor weight = at::ones({2}).requires_grad_(), other = at::ones({2}).requires_grad_();
  torch::optim::SGD optimizer{std::vector<at::Tensor>{weight}, 0.5}, of_other{std::vector<at::Tensor>{other}, 0.5},
      again{std::vector<at::Tensor>{weight}, 0.5};
};

c10::IValue state_with_scale(double scale) { return GradScaler({.init_scale = scale}).state_dict(); }

constexpr const char* kLoaded = "GradScaler: this rank called load_state_dict() between backward() and the scaler's ";
constexpr const char* kLoadedByAll = "GradScaler: {all} called load_state_dict() between backward() and the scaler's ";
constexpr const char* kStale = "GradScaler: {all} ran the backward of a loss that has the scale ";
constexpr const char* kLater =
    "GradScaler: this rank ran 1 backward pass through scale() between unscale() and step() ";
constexpr const char* kLaterOfOwn = "GradScaler: this rank ran backward through scale() between unscale() and step() ";
constexpr const char* kBeside =
    " was changed while its gradient still had the scale of a GradScaler, as optimizer.step() does; call ";
constexpr const char* kTwice =
    "GradScaler: {all} gave unscale() or step() an optimizer that has parameters of another ";

Programs of_scales() {
  return {
      {"a_state_loaded_before_the_step", kLoaded,
       [](Side& s) {
         s.train(s.optimizer);
         s.before = s.weights();
         s.backward(true);
         s.scaler.load_state_dict(state_with_scale(4));
         s.scaler.step(s.optimizer);
       }},
      {"a_state_loaded_before_the_step_of_one_process", kLoadedByAll,
       [](Side& s) {
         Own own;
         GradScaler scaler(s.context.group());
         scaler.scale(own.weight.sum()).backward();
         scaler.load_state_dict(state_with_scale(4));
         scaler.step(own.optimizer);
       }},
      {"a_state_loaded_before_a_sharded_step", kLoaded,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.train(sharded);
         s.before = s.weights();
         s.backward(true);
         s.scaler.load_state_dict(state_with_scale(4));
         s.scaler.step(sharded);
       }},
      {"a_new_scale_before_the_step", "GradScaler: this rank called update(new_scale) between backward() and the ",
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         s.scaler.update(4);
         s.scaler.step(s.optimizer);
       }},
      {"scaled_before_update", kStale,
       [](Side& s) {
         const at::Tensor early = s.scaler.scale(s.loss(1));
         s.scaler.update(4);
         s.before = s.weights();
         early.backward();
         s.scaler.step(s.optimizer);
       }},
      {"scaled_before_update_of_one_process", kStale,
       [](Side& s) {
         Own own;
         GradScaler scaler(s.context.group());
         const at::Tensor early = scaler.scale(own.weight.sum());
         scaler.update(4);
         early.backward();
         scaler.step(own.optimizer);
       }},
      {"scaled_before_a_state_was_loaded", kStale,
       [](Side& s) {
         const at::Tensor early = s.scaler.scale(s.loss());
         s.scaler.load_state_dict(state_with_scale(4));
         s.before = s.weights();
         early.backward();
         s.scaler.unscale(s.optimizer);
       }},
      {"used_after_it_was_moved", "GradScaler: it was moved from; use the object that it was moved to",
       [](Side& s) {
         const GradScaler moved(std::move(s.scaler));
         s.scaler.scale(s.loss());
       }},
  };
}

/// The values of a model at another time.
StateDict copied_state(const torch::nn::Module& model) {
  StateDict state;
  for (const auto& item : state_dict(model)) state.insert(item.key(), item.value().detach().clone());
  return state;
}

Programs of_loaded_models() {
  const auto load = [](Side& s, bool here) {
    const StateDict first = copied_state(*s.model);
    s.train(s.optimizer);
    s.backward(true);
    if (here) load_state_dict(*s.model, first);
    s.before = s.weights();
    s.scaler.step(s.optimizer);
  };
  return {
      {"a_model_loaded_before_the_step", "GradScaler: {all} changed parameter ", [load](Side& s) { load(s, true); }},
      {"a_model_loaded_before_the_step_of_one_rank", "GradScaler: {odd} changed parameter ",
       [load](Side& s) { load(s, s.odd); }},
      {"a_model_loaded_after_the_step", "",
       [](Side& s) {
         const StateDict first = copied_state(*s.model);
         s.train(s.optimizer);
         load_state_dict(*s.model, first);
         s.train(s.optimizer);
       }},
      {"a_model_loaded_after_gradients_were_cleared", "",
       [](Side& s) {
         const StateDict first = copied_state(*s.model);
         s.train(s.optimizer);
         s.backward(true);
         s.optimizer.zero_grad();
         load_state_dict(*s.model, first);
         s.train(s.optimizer);
       }},
      {"the_same_values_loaded_before_the_step", "",
       [](Side& s) {
         s.train(s.optimizer);
         s.backward(true);
         load_state_dict(*s.model, copied_state(*s.model));
         EXPECT_TRUE(s.scaler.step(s.optimizer));
         s.scaler.update();
       }},
  };
}

Programs of_steps() {
  return {
      {"a_pass_after_unscale", kLater,
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         s.scaler.unscale(s.optimizer);
         s.backward(true, 1);
         s.scaler.step(s.optimizer);
       }},
      {"a_pass_after_unscale_before_a_sharded_step", kLater,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.before = s.weights();
         s.backward(true);
         s.scaler.unscale(sharded);
         s.backward(true, 1);
         s.scaler.step(sharded);
       }},
      {"a_pass_after_unscale_of_one_process", kLaterOfOwn,
       [](Side& s) {
         Own own;
         GradScaler scaler(s.context.group());
         scaler.scale(own.weight.sum()).backward();
         scaler.unscale(own.optimizer);
         scaler.scale((own.weight * own.other).sum()).backward();
         scaler.step(own.optimizer);
       }},
      {"unscaled_by_one_optimizer_and_stepped_by_another", kTwice,
       [](Side& s) {
         auto other = make_sgd(*s.model);
         s.before = s.weights();
         s.backward(true);
         s.scaler.unscale(s.optimizer);
         s.scaler.step(other);
       }},
      {"unscaled_by_one_optimizer_and_stepped_by_another_in_one_process", kTwice,
       [](Side& s) {
         Own own;
         GradScaler scaler(s.context.group());
         scaler.scale(own.weight.sum()).backward();
         scaler.unscale(own.optimizer);
         scaler.step(own.again);
       }},
      {"a_discriminator_stepped_by_itself", "GradScaler: {all} changed parameter d.",
       [](Side& s) {
         Pair pair(s.context);
         s.scaler.scale(pair.loss_of_d(0)).backward();
         pair.of_d.step();
         s.scaler.step(pair.of_d);
       }},
      {"a_discriminator_stepped_by_itself_before_the_next_backward", std::string("{all}: parameter d. ... ") + kBeside,
       [](Side& s) {
         Pair pair(s.context);
         s.scaler.scale(pair.loss_of_d(0)).backward();
         pair.of_d.step();
         pair.of_d.zero_grad();
         s.scaler.scale(pair.loss_of_g(0)).backward();
       }},
      {"one_rank_steps_by_itself_before_the_next_backward", std::string("{odd}: parameter d. ... ") + kBeside,
       [](Side& s) {
         Pair pair(s.context);
         s.scaler.scale(pair.loss_of_d(0)).backward();
         if (s.odd) pair.of_d.step();
         pair.of_d.zero_grad();
         s.scaler.scale(pair.loss_of_d(1)).backward();
       }},
      {"one_of_two_optimizers_stepped_by_itself_after_the_other", "GradScaler: this rank changed parameter d.",
       [](Side& s) {
         Pair pair(s.context);
         s.scaler.scale(pair.loss_of_g(0)).backward();  // of both
         s.scaler.step(pair.of_g);
         pair.of_d.step();
         s.scaler.update();
       }},
      {"one_of_two_optimizers_stepped_by_itself_before_the_other", "GradScaler: {all} changed parameter d.",
       [](Side& s) {
         Pair pair(s.context);
         s.scaler.scale(pair.loss_of_d(0) + pair.loss_of_g(0)).backward();
         pair.of_d.step();
         s.scaler.step(pair.of_g);
       }},
  };
}

/// A weight of this rank alone, that no replica follows.
struct Alone {
  at::Tensor loss() const { return (weight * weight).sum(); }
  at::Tensor weight = at::full({3}, 2.F).requires_grad_();
  torch::optim::SGD optimizer{{weight}, 0.1};
};

Programs of_gradients_after_unscale() {
  constexpr const char* kCleared =
      "GradScaler: this rank cleared the gradients of the optimizer between unscale() and step(), ";
  constexpr const char* kAdded = "GradScaler: {all} added gradients to those that a step had used, ";
  const auto cleared = [](const char* name, const char* expected, bool to_none) {
    return TabledProgram<Side>{name, expected, [to_none](Side& s) {
                                 s.train(s.optimizer);
                                 s.before = s.weights();
                                 s.backward(true);
                                 s.scaler.unscale(s.optimizer);
                                 s.optimizer.zero_grad(to_none);
                                 s.scaler.step(s.optimizer);
                               }};
  };
  return {
      cleared("cleared_after_unscale", kCleared, true),
      cleared("set_to_zero_after_unscale", kCleared, false),
      {"cleared_after_unscale_before_a_sharded_step", kCleared,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.backward(true);
         s.scaler.unscale(sharded);
         sharded.zero_grad();
         s.scaler.step(sharded);
       }},
      {"never_cleared_without_a_replica", kAdded,
       [](Side& s) {
         GradScaler scaler(s.context.group(), {.init_scale = 8});
         Alone alone;
         for (int step = 0; step < 2; ++step) {
           scaler.scale(alone.loss()).backward();
           scaler.step(alone.optimizer);
           scaler.update();
         }
       }},
      {"never_cleared_without_a_replica_and_unscaled", kAdded,
       [](Side& s) {
         GradScaler scaler(s.context.group(), {.init_scale = 8});
         Alone alone;
         for (int step = 0; step < 2; ++step) {
           scaler.scale(alone.loss()).backward();
           scaler.unscale(alone.optimizer);
           scaler.step(alone.optimizer);
           scaler.update();
         }
       }},
      {"averaged_by_hand_by_a_scaler_of_one_rank", "",
       [](Side& s) {
         GradScaler scaler({.init_scale = 8});
         Alone alone;
         (scaler.scale(alone.loss()) * (s.odd ? kInfinity : 1)).backward();
         scaler.unscale(alone.optimizer);
         s.context.group().all_reduce(alone.weight.mutable_grad());
         std::string said;
         try {
           EXPECT_FALSE(scaler.step(alone.optimizer));
         } catch (const Error& error) {
           said = error.what();
         }
         EXPECT_EQ(said.find("has infinity or NaN in gradients that were finite when unscale()") == std::string::npos,
                   s.odd)
             << said;
         EXPECT_TRUE(alone.weight.detach().equal(at::full({3}, 2.F)));
       }},
  };
}

Programs that_are_right() {
  return {
      {"gradients_without_a_replica", "",
       [](Side& s) {
         GradScaler scaler(s.context.group(), {.init_scale = 8});
         Alone alone;
         for (int step = 0; step < 6; ++step) {
           if (step % 2 == 0) scaler.scale(alone.loss()).backward();
           scaler.scale(alone.loss()).backward();
           if (step % 3 == 0) {
             scaler.unscale(alone.optimizer);
             torch::nn::utils::clip_grad_norm_({alone.weight}, 1);
           }
           EXPECT_TRUE(scaler.step(alone.optimizer));
           scaler.update();
           if (step == 2)
             alone.weight.mutable_grad().zero_();
           else
             alone.optimizer.zero_grad(/*set_to_none=*/step % 2 == 0);
         }
       }},
      {"some_gradients_taken_out_after_unscale", "",
       [](Side& s) {
         s.backward(true);
         s.scaler.unscale(s.optimizer);
         s.model->parameters().front().mutable_grad().reset();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"gradients_that_are_all_zeros", "",
       [](Side& s) {
         for (int step = 0; step < 2; ++step) {
           (s.scaler.scale(s.loss()) * 0).backward();
           if (step == 1) s.scaler.unscale(s.optimizer);
           EXPECT_TRUE(s.scaler.step(s.optimizer));
           s.scaler.update();
           s.optimizer.zero_grad();
         }
       }},
      {"a_gan_without_a_replica", "",
       [](Side& s) {
         GradScaler scaler(s.context.group(), {.init_scale = 8});
         Alone discriminator, generator;
         for (int step = 0; step < 3; ++step) {
           discriminator.optimizer.zero_grad();
           scaler.scale(discriminator.loss()).backward();
           EXPECT_TRUE(scaler.step(discriminator.optimizer));
           generator.optimizer.zero_grad();
           scaler.scale((discriminator.weight * generator.weight).sum()).backward();
           EXPECT_TRUE(scaler.step(generator.optimizer));
           scaler.update();
         }
       }},
      {"several_losses_and_optimizers", "",  // as in PyTorch's example
       [](Side& s) {
         Pair pair(s.context);
         for (int step = 0; step < 3; ++step) {
           pair.of_d.zero_grad();
           pair.of_g.zero_grad();
           const at::Tensor of_both = pair.loss_of_g(step), of_d = pair.loss_of_d(step);
           s.scaler.scale(of_both).backward({}, /*retain_graph=*/true);
           s.scaler.scale(of_d).backward();
           s.scaler.unscale(pair.of_d);
           torch::nn::utils::clip_grad_norm_(pair.d->parameters(), 0.1);
           EXPECT_TRUE(s.scaler.step(pair.of_d));
           EXPECT_TRUE(s.scaler.step(pair.of_g));
           s.scaler.update();
         }
       }},
      {"the_backward_of_another_loss_after_unscale", "",
       [](Side& s) {
         Pair pair(s.context);
         Own own;
         GradScaler scaler(s.context.group());
         for (int step = 0; step < 2; ++step) {
           s.scaler.scale(pair.loss_of_g(step)).backward();
           s.scaler.unscale(pair.of_g);
           pair.of_d.zero_grad();
           s.scaler.scale(pair.loss_of_d(step)).backward();  // does not reach g
           EXPECT_TRUE(s.scaler.step(pair.of_g));
           EXPECT_TRUE(s.scaler.step(pair.of_d));
           s.scaler.update();
           pair.of_g.zero_grad();
           scaler.scale(own.weight.sum()).backward();
           scaler.unscale(own.optimizer);
           scaler.scale(own.other.sum()).backward();
           own.weight.sum().backward();  // nor has this a scale
           EXPECT_TRUE(scaler.step(own.optimizer));
           EXPECT_TRUE(scaler.step(own.of_other));
           scaler.update();
           own.optimizer.zero_grad();
           own.of_other.zero_grad();
         }
         EXPECT_TRUE(own.weight.equal(at::full({2}, -1.f)));
         EXPECT_TRUE(own.other.equal(at::zeros({2})));
       }},
      {"a_gan_that_clamps_its_discriminator", "",
       [](Side& s) {
         Pair pair(s.context);
         for (int step = 0; step < 4; ++step) {
           pair.of_d.zero_grad();
           s.scaler.scale(pair.loss_of_d(step)).backward();
           EXPECT_TRUE(s.scaler.step(pair.of_d));
           s.scaler.update();
           pair.of_g.zero_grad();
           s.scaler.scale(pair.loss_of_g(step)).backward();
           EXPECT_TRUE(s.scaler.step(pair.of_g));
           for (const at::Tensor& parameter : pair.d->parameters()) parameter.data().clamp_(-0.01, 0.01);
           s.scaler.update();
         }
       }},
      {"an_overflow_and_a_step_given_up", "",
       [](Side& s) {
         s.train(s.optimizer);
         (s.scaler.scale(s.loss()) * std::numeric_limits<float>::infinity()).backward();
         EXPECT_FALSE(s.scaler.step(s.optimizer));
         s.scaler.update();
         s.optimizer.zero_grad();
         s.backward(true);
         s.optimizer.zero_grad();
         s.scaler.load_state_dict(state_with_scale(64));
         s.train(s.optimizer);
       }},
      {"a_state_loaded_after_a_step", "",
       [](Side& s) {
         s.backward(true);
         EXPECT_TRUE(s.scaler.step(s.optimizer));
         s.scaler.update();
         s.scaler.load_state_dict(state_with_scale(64));
         s.optimizer.zero_grad();
         s.train(s.optimizer);
         Own own;
         GradScaler scaler(s.context.group());
         scaler.scale(own.weight.sum()).backward();
         own.optimizer.zero_grad();
         scaler.load_state_dict(state_with_scale(64));
         scaler.scale(own.weight.sum()).backward();
         EXPECT_TRUE(scaler.step(own.optimizer));
         EXPECT_TRUE(own.weight.equal(at::full({2}, 0.5f)));
       }},
      {"two_optimizers_of_the_same_parameters_in_turns", "",
       [](Side& s) {
         Own own;
         GradScaler scaler(s.context.group());
         for (torch::optim::Optimizer* by : {static_cast<torch::optim::Optimizer*>(&own.optimizer),
                                             static_cast<torch::optim::Optimizer*>(&own.again)}) {
           scaler.scale(own.weight.sum()).backward();
           EXPECT_TRUE(scaler.step(*by));
           by->zero_grad();
         }
         scaler.update();
         EXPECT_TRUE(own.weight.equal(at::zeros({2})));
       }},
      {"a_loss_scaled_early_by_the_same_scale", "",
       [](Side& s) {
         const at::Tensor early = s.scaler.scale(s.loss());
         s.scaler.update(1024);
         early.backward();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"a_scaler_that_was_moved", "",
       [](Side& s) {
         s.backward(true);
         GradScaler moved(std::move(s.scaler));
         EXPECT_TRUE(moved.step(s.optimizer));
         moved.update();
         s.scaler = std::move(moved);
         s.optimizer.zero_grad();
         s.train(s.optimizer);
       }},
  };
}

using WrongScalerSequences = OfScalers;
INSTANTIATE_TEST_SUITE_P(Engines, WrongScalerSequences, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongScalerSequences, AnotherScaleThanTheGradients) { expect(of_scales()); }
TEST_P(WrongScalerSequences, ModelsLoadedWhileGradientsHaveTheScale) { expect(of_loaded_models()); }
TEST_P(WrongScalerSequences, GradientsUsedTwiceOrWithTheirScale) { expect(of_steps()); }
TEST_P(WrongScalerSequences, GradientsThatOthersChanged) { expect(of_gradients_after_unscale()); }
TEST_P(WrongScalerSequences, RecipesThatAreRightAreNone) { expect(that_are_right()); }

/// The last iteration, after which nothing else can tell.
TEST(WrongScalerSequencesTest, AScalerThatEndsWarnsOfAStepBesideIt) {
  run_ranks(2, [](Context& context) {
    std::string said;
    for (const bool beside : {false, true}) {
      Side side(context);
      side.backward(true);
      beside ? (side.optimizer.step(), true) : side.scaler.step(side.optimizer);
      ::testing::internal::CaptureStderr();
      { const GradScaler ends(std::move(side.scaler)); }
      said = ::testing::internal::GetCapturedStderr();
      EXPECT_EQ(said.find("a GradScaler ends, and this rank changed parameter ") != std::string::npos, beside) << said;
    }
  });
}

}  // namespace
}  // namespace lockstep::wrong_scaler_sequences_test
