#include <gtest/gtest.h>

#include <cfloat>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "train/scaler_side.h"

// Programs with a GradScaler that would end well, with wrong numbers: optimizers stepped beside the scaler, losses that
// are no multiple of what was scaled, gradients that were cleared. Beside them programs like them that are right.

namespace lockstep::unnoticed_steps_test {
namespace {

using namespace testing;             // NOLINT
using namespace wrong_scalers_test;  // NOLINT

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Two equal networks in one replica, with an optimizer each.
struct Two {
  explicit Two(Context& context) : replica(all(), context) {}
  NamedTensors all() const {
    NamedTensors named;
    for (const auto& one : a->named_parameters()) named.emplace_back("a." + one.key(), one.value());
    for (const auto& one : b->named_parameters()) named.emplace_back("b." + one.key(), one.value());
    return named;
  }
  at::Tensor loss(int step) {
    const at::Tensor x = at::full({4, 3}, 0.1 * (step + 1));
    return a->forward(x).square().mean() + b->forward(x).square().mean();
  }
  torch::nn::Linear a{3, 2}, b{3, 2};
  DistributedDataParallel<NamedTensors> replica;
  torch::optim::SGD of_a{a->parameters(), 0.1}, of_b{b->parameters(), 0.1};
};

void backward_to_infinity(Side& s) { (s.scaler.scale(s.loss()) * kInfinity).backward(); }

constexpr const char* kStepped = " stepped an optimizer with gradients in which the scaler had found infinity or NaN, ";
constexpr const char* kAgain = " stepped an optimizer again after the scaler's step() had used its gradients, ";
constexpr const char* kAllZero = "GradScaler: all gradients of the optimizer were cleared between backward() and ";

Programs of_infinity() {
  const std::string here = std::string("GradScaler: this rank") + kStepped,
                    all = std::string("GradScaler: {all}") + kStepped;
  return {
      {"stepped_by_itself_after_unscale", here,
       [](Side& s) {
         backward_to_infinity(s);
         s.scaler.unscale(s.optimizer);
         s.optimizer.step();
         s.scaler.update();
       }},
      {"adamw_stepped_by_itself_after_unscale", here,
       [](Side& s) {
         torch::optim::AdamW adamw(s.model->parameters());
         s.train(adamw);
         backward_to_infinity(s);
         s.scaler.unscale(adamw);
         adamw.step();
         s.scaler.update();
       }},
      {"stepped_by_itself_after_update", all,
       [](Side& s) {
         for (int step = 0; step < 3; ++step) {
           s.optimizer.zero_grad();
           step == 1 ? backward_to_infinity(s) : s.backward(true, step);
           s.scaler.unscale(s.optimizer);
           s.scaler.update();
           s.optimizer.step();
         }
       }},
      {"stepped_by_itself_after_a_step_that_was_left_out", here,
       [](Side& s) {
         backward_to_infinity(s);
         EXPECT_FALSE(s.scaler.step(s.optimizer));
         s.optimizer.step();
         s.scaler.update();
       }},
      {"a_sharded_step_after_unscale", here,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.train(sharded);
         backward_to_infinity(s);
         s.scaler.unscale(sharded);
         sharded.step();
         s.scaler.update();
       }},
      {"weights_without_a_replica", here,
       [](Side& s) {
         at::Tensor weight = at::ones({2}).requires_grad_();
         torch::optim::SGD own({weight}, 0.1);
         GradScaler scaler(s.context.group());
         (scaler.scale(weight.sum()) * kInfinity).backward();
         scaler.unscale(own);
         own.step();
         scaler.update();
       }},
  };
}

/// Steps again after update(), in a loop or once.
template <typename Optimizer, typename... Options>
std::function<void(Side&)> again(Options... options) {
  return [=](Side& s) {
    Optimizer optimizer(s.model->parameters(), options...);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      s.backward(true, step);
      s.scaler.step(optimizer);
      s.scaler.update();
      optimizer.step();
    }
  };
}

Programs of_steps_again() {
  const std::string all = std::string("GradScaler: {all}") + kAgain;
  return {
      {"sgd_after_update", all, again<torch::optim::SGD>(0.1)},
      {"sgd_with_decay_after_update", all, again<torch::optim::SGD>(torch::optim::SGDOptions(0.1).weight_decay(0.01))},
      {"sgd_with_momentum_after_update", all, again<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9))},
      {"adamw_after_update", all, again<torch::optim::AdamW>()},
      {"adam_after_update", all, again<torch::optim::Adam>()},
      {"rmsprop_after_update", all, again<torch::optim::RMSprop>()},
      {"adagrad_after_update", all, again<torch::optim::Adagrad>()},
      {"sgd_before_update", std::string("GradScaler: this rank") + kAgain,
       [](Side& s) {
         s.backward(true);
         s.scaler.step(s.optimizer);
         s.optimizer.step();
         s.scaler.update();
       }},
      {"sgd_with_another_rate_before_the_next_backward", all,
       [](Side& s) {
         s.train(s.optimizer);
         s.backward(true);
         s.scaler.step(s.optimizer);
         s.scaler.update();
         for (auto& group : s.optimizer.param_groups()) group.options().set_lr(0.03);
         s.optimizer.step();
         s.optimizer.zero_grad();
         s.backward(true);
         s.scaler.unscale(s.optimizer);
       }},
      {"adamw_after_update_on_one_rank", std::string("GradScaler: {odd}") + kAgain,
       [](Side& s) {
         torch::optim::AdamW adamw(s.model->parameters());
         s.backward(true);
         s.scaler.step(adamw);
         s.scaler.update();
         if (s.odd) adamw.step();
         adamw.zero_grad();
         s.backward(true);
         s.scaler.step(adamw);
       }},
      {"another_optimizer_in_a_loop", "{all}: parameter b. ... was changed while its gradient still had the scale of ",
       [](Side& s) {
         Two two(s.context);
         for (int step = 0; step < 2; ++step) {
           s.scaler.scale(two.loss(step)).backward();
           s.scaler.step(two.of_a);
           s.scaler.update();
           two.of_b.step();
           two.of_a.zero_grad();
           two.of_b.zero_grad();
         }
       }},
  };
}

Programs of_losses() {
  const auto nonlinear = [](const char* operation, std::function<at::Tensor(const at::Tensor&)> function) {
    return TabledProgram<Side>{
        std::string("nonlinear_") + operation,
        std::string("GradScaler: {all} ran the backward of a scaled loss to which ") + operation + " ",
        [function](Side& s) {
          s.before = s.weights();
          function(s.scaler.scale(s.loss())).backward();
          s.scaler.step(s.optimizer);
        }};
  };
  constexpr const char* kTwo = "GradScaler: {all} ran a backward in which two GradScalers had scaled the loss, ";
  constexpr const char* kBeside = "GradScaler: {all} added a value without scale() to a loss that scale() had scaled, ";
  return {
      nonlinear("PowBackward0", [](const at::Tensor& t) { return t.pow(2); }),
      nonlinear("LogBackward0", [](const at::Tensor& t) { return (2 * t).log() + 1; }),
      nonlinear("ExpBackward0", [](const at::Tensor& t) { return (t / 1e6).exp().reshape({1}).sum(); }),
      nonlinear("SqrtBackward0",
                [](const at::Tensor& t) {
                  return at::stack({t.sqrt(), t}).sum();
                }),
      nonlinear("ClampBackward1", [](const at::Tensor& t) { return t.clamp(0, 1e6); }),
      nonlinear("ReciprocalBackward0", [](const at::Tensor& t) { return t.reciprocal(); }),
      nonlinear("DivBackward0", [](const at::Tensor& t) { return at::ones({}) / t; }),
      nonlinear("SigmoidBackward0", [](const at::Tensor& t) { return (t / 1e6).sigmoid(); }),
      nonlinear("MulBackward0", [](const at::Tensor& t) { return t * t / 1e3; }),
      // A positive factor passes through these, unless a constant is added before.
      nonlinear("AbsBackward0", [](const at::Tensor& t) { return (t - 5).abs(); }),
      nonlinear("ReluBackward0", [](const at::Tensor& t) { return at::relu(2 - t); }),
      nonlinear("LeakyReluBackward0", [](const at::Tensor& t) { return at::leaky_relu(2 * t + at::ones({})); }),
      nonlinear("MaximumBackward0", [](const at::Tensor& t) { return at::maximum(t, at::ones({})); }),
      nonlinear("MinimumBackward0", [](const at::Tensor& t) { return at::minimum(at::full({}, 1e9), t); }),
      nonlinear("FmaxBackward0", [](const at::Tensor& t) { return at::fmax(t, at::ones({})) / 2; }),
      nonlinear("HypotBackward0", [](const at::Tensor& t) { return at::hypot(t, at::ones({})); }),
      nonlinear("MaxBackward1",
                [](const at::Tensor& t) {
                  return at::stack({t, at::ones({})}).max();
                }),
      nonlinear("LinalgVectorNormBackward0",
                [](const at::Tensor& t) {
                  return at::linalg_vector_norm(at::addcmul(at::ones({2}), t.expand({2}), at::ones({2})));
                }),
      nonlinear("AddcmulBackward0", [](const at::Tensor& t) { return at::addcmul(t, t, t); }),
      nonlinear("AddcdivBackward0", [](const at::Tensor& t) { return at::addcdiv(t, at::ones({}), t); }),
      {"an_unscaled_part_by_lerp", kBeside,
       [](Side& s) {
         at::lerp(s.scaler.scale(s.loss()), s.loss(1), 0.5).backward();
         s.scaler.step(s.optimizer);
       }},
      {"an_unscaled_part_by_where", kBeside,
       [](Side& s) {
         at::where(at::arange(2).eq(0), s.scaler.scale(s.loss()).expand({2}), s.loss(1).expand({2})).sum().backward();
         s.scaler.step(s.optimizer);
       }},
      {"an_unscaled_part_by_addcmul", kBeside,
       [](Side& s) {
         at::addcmul(s.scaler.scale(s.loss()), s.loss(1), at::ones({})).backward();
         s.scaler.step(s.optimizer);
       }},
      {"an_unscaled_product_by_addcmul", kBeside,
       [](Side& s) {
         at::addcmul(s.scaler.scale(s.loss()), s.loss(1), at::full({}, 2.F)).backward();
         s.scaler.step(s.optimizer);
       }},
      {"an_unscaled_part_by_copies", kBeside,
       [](Side& s) {
         const at::Tensor both = at::zeros({2});
         both[0].copy_(s.scaler.scale(s.loss()));
         both[1].copy_(s.loss(1));
         both.sum().backward();
         s.scaler.step(s.optimizer);
       }},
      {"two_scalers_in_a_sum", kTwo,
       [](Side& s) {
         GradScaler other({.init_scale = 8});
         (s.scaler.scale(s.loss()) + other.scale(s.loss(1))).backward();
         s.scaler.step(s.optimizer);
       }},
      {"two_scalers_in_a_product",
       "GradScaler: {all} gave scale() a value that was computed from a loss that scale() had already scaled",
       [](Side& s) {
         GradScaler other({.init_scale = 8});
         s.scaler.scale(other.scale(s.loss())).backward();
         s.scaler.step(s.optimizer);
       }},
      {"two_scalers_in_a_product_and_the_other_steps", kTwo,
       [](Side& s) {
         GradScaler other({.init_scale = 8});
         other.scale(s.scaler.scale(s.loss())).backward();
         s.scaler.step(s.optimizer);
       }},
      {"two_scalers_without_a_replica", kTwo,
       [](Side& s) {
         const at::Tensor weight = at::ones({2}).requires_grad_();
         torch::optim::SGD own({weight}, 0.1);
         GradScaler one(s.context.group()), other({.init_scale = 8});
         (one.scale(weight.sum()) + other.scale(weight.sum())).backward();
         one.step(own);
       }},
      {"scaled_twice_far_apart",
       "GradScaler: {all} gave scale() a value that was computed from a loss that scale() had already scaled",
       [](Side& s) {
         at::Tensor loss = s.scaler.scale(s.loss());
         for (int i = 0; i < 100; ++i) loss = loss + 1;
         s.scaler.scale(loss).backward();
         s.scaler.step(s.optimizer);
       }},
  };
}

Programs of_others() {
  return {
      {"set_to_zero_by_all", kAllZero,
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         s.optimizer.zero_grad(/*set_to_none=*/false);
         s.scaler.step(s.optimizer);
       }},
      {"set_to_zero_by_all_before_unscale", kAllZero,
       [](Side& s) {
         torch::optim::AdamW adamw(s.model->parameters());
         s.train(adamw);
         s.before = s.weights();
         s.backward(true);
         adamw.zero_grad(/*set_to_none=*/false);
         s.scaler.unscale(adamw);
       }},
      {"set_to_zero_by_all_before_a_sharded_step", kAllZero,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.before = s.weights();
         s.backward(true);
         sharded.zero_grad(/*set_to_none=*/false);
         s.scaler.step(sharded);
       }},
      {"a_loss_that_is_never_finite", "GradScaler: update() would lower the scale below the smallest normal float, ",
       [](Side& s) {
         GradScaler scaler(s.context.group(), {.backoff_factor = 1e-9});
         for (int step = 0; step < 6; ++step) {
           (scaler.scale(s.loss()) * kInfinity).backward();
           EXPECT_FALSE(scaler.step(s.optimizer));
           scaler.update();
           s.optimizer.zero_grad();
         }
       }},
      {"a_scale_that_is_no_normal_float", "GradScaler: init_scale is 1e-40; it must be a normal float above 0",
       [](Side& s) { const GradScaler scaler(s.context.group(), {.init_scale = 1e-40}); }},
      {"a_new_scale_that_is_no_normal_float", "update(): new_scale is 1e-40; it must be a normal float above 0",
       [](Side& s) { s.scaler.update(1e-40); }},
      {"optimizers_in_another_order",
       "GradScaler: {odd} called step() with the optimizer of parameter b.weight and 1 more, and {rest} with that of "
       "parameter a.weight and 1 more; call ",
       [](Side& s) {
         Two two(s.context);
         const auto first = [&](auto& one, auto& other) {
           s.scaler.step(one);
           s.scaler.step(other);
         };
         s.scaler.scale(two.loss(0)).backward();
         s.odd ? first(two.of_b, two.of_a) : first(two.of_a, two.of_b);
       }},
      {"models_of_the_same_names_in_another_order",
       "GradScaler: {odd} called step() with the optimizer of parameter a.weight and 1 more, and {rest} with that of "
       "another model with parameters of the same names; call ",
       [](Side& s) {
         Two one(s.context), other(s.context);
         for (Two* two : {&one, &other}) s.scaler.scale(two->loss(0)).backward();
         s.scaler.step(s.odd ? other.of_a : one.of_a);
       }},
  };
}

Programs that_are_right() {
  return {
      {"infinity_that_the_program_takes_out", "",
       [](Side& s) {
         s.train(s.optimizer);
         backward_to_infinity(s);
         s.scaler.unscale(s.optimizer);
         for (const at::Tensor& parameter : s.model->parameters()) parameter.mutable_grad().nan_to_num_(0, 0, 0);
         s.optimizer.step();
         s.scaler.update();
         s.optimizer.zero_grad();
         s.train(s.optimizer);
       }},
      {"weights_that_are_set_between_steps", "",
       [](Side& s) {
         torch::optim::SGD sgd(s.model->parameters(), 0.1);
         torch::optim::AdamW adamw(s.model->parameters());
         for (torch::optim::Optimizer* by :
              {static_cast<torch::optim::Optimizer*>(&sgd), static_cast<torch::optim::Optimizer*>(&adamw)})
           for (int step = 0; step < 2; ++step) {
             s.backward(true, step);
             EXPECT_TRUE(s.scaler.step(*by));
             {
               const torch::NoGradGuard no_grad;
               for (const at::Tensor& parameter : s.model->parameters()) parameter.clamp_(-0.05, 0.05);
             }
             s.scaler.update();
             const torch::NoGradGuard no_grad;
             for (const at::Tensor& parameter : s.model->parameters()) parameter.mul_(0.99);
             by->zero_grad();
           }
       }},
      {"a_momentum_that_starts_anew", "",
       [](Side& s) {
         torch::optim::SGD sgd(s.model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
         for (int step = 0; step < 2; ++step) {
           s.train(sgd);
           for (const auto& [parameter, state] : sgd.state())
             static_cast<torch::optim::SGDParamState&>(*state).momentum_buffer().zero_();
         }
       }},
      {"steps_with_and_without_a_scale_in_turns", "",
       [](Side& s) {
         torch::optim::AdamW adamw(s.model->parameters());
         for (int step = 0; step < 3; ++step) {
           s.train(adamw);
           s.backward(false, step);
           adamw.step();
           adamw.zero_grad();
         }
       }},
      {"multiples_of_a_scaled_loss", "",
       [](Side& s) {
         const at::Tensor l = s.scaler.scale(s.loss()), w = at::full({}, 2.F).requires_grad_();
         at::Tensor loss =
             -(-l.abs() * 3 / 3) + at::relu(l) - l.max() + l.expand({2}).mean() * 0 + (l * w.detach()) / 2 - l;
         loss = at::maximum(loss, 2 * loss) + at::stack({l, l / 2}).amax() + at::addcmul(l, l, at::ones({})) +
                at::addcdiv(at::ones({}), l, at::ones({})) + (at::relu(l) + 3) - at::minimum(l, l * 3);
         loss = at::where(at::arange(2).eq(0), loss.expand({2}), loss.expand({2}).clone()).to(at::kDouble).sum() / 2;
         loss.backward();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"a_scaled_loss_times_a_parameter", "",
       [](Side& s) {
         const at::Tensor w = at::full({}, 2.F).requires_grad_();
         torch::optim::SGD of_w({w}, 0.1);
         (s.scaler.scale(s.loss()) * w).backward();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
         EXPECT_TRUE(s.scaler.step(of_w));
       }},
      {"two_scalers_in_turns", "",
       [](Side& s) {
         GradScaler other(s.context.group(), {.init_scale = 8});
         for (int step = 0; step < 2; ++step) {
           s.train(s.optimizer);
           other.scale(s.loss(step)).backward();
           EXPECT_TRUE(other.step(s.optimizer));
           other.update();
           s.optimizer.zero_grad();
         }
       }},
      {"an_optimizer_made_anew_where_another_was", "",
       [](Side& s) {
         Two two(s.context);
         std::optional<torch::optim::SGD> optimizer;
         optimizer.emplace(two.a->parameters(), 0.1);
         s.scaler.scale(two.loss(0)).backward();
         EXPECT_TRUE(s.scaler.step(*optimizer));
         optimizer.emplace(two.b->parameters(), 0.1);
         EXPECT_TRUE(s.scaler.step(*optimizer));
         optimizer.reset();
         s.scaler.update();
       }},
      {"a_few_infinities", "",
       [](Side& s) {
         for (int step = 0; step < 30; ++step) {
           backward_to_infinity(s);
           EXPECT_FALSE(s.scaler.step(s.optimizer));
           s.scaler.update();
           s.optimizer.zero_grad();
         }
         s.train(s.optimizer);
       }},
  };
}

using UnnoticedSteps = OfScalers;
INSTANTIATE_TEST_SUITE_P(Engines, UnnoticedSteps, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(UnnoticedSteps, WithInfinity) { expect(of_infinity()); }
TEST_P(UnnoticedSteps, WithGradientsThatWereUsed) { expect(of_steps_again()); }
TEST_P(UnnoticedSteps, OfLossesThatAreNoMultiple) { expect(of_losses()); }
TEST_P(UnnoticedSteps, WithoutGradientsOrInAnotherOrder) { expect(of_others()); }
TEST_P(UnnoticedSteps, ProgramsThatAreRightAreNone) { expect(that_are_right()); }

/// The last iteration, after which nothing else can tell.
TEST(UnnoticedStepsTest, AScalerThatEndsWarns) {
  run_ranks(2, [](Context& context) {
    const auto warning = [&](const std::function<void(Side&, Two&)>& program) {
      Side side(context);
      Two two(context);
      program(side, two);
      ::testing::internal::CaptureStderr();
      { const GradScaler ends(std::move(side.scaler)); }
      return ::testing::internal::GetCapturedStderr();
    };
    const auto train = [](Side& s, Two& two) {
      s.scaler.scale(two.loss(0)).backward();
      s.scaler.step(two.of_a);
      s.scaler.update();
    };
    EXPECT_EQ(warning([&](Side& s, Two& two) {
                s.scaler.scale(two.loss(0)).backward();
                s.scaler.step(two.of_a);
                s.scaler.step(two.of_b);
                s.scaler.update();
              }),
              "");
    const std::string of_another = warning([&](Side& s, Two& two) {
      train(s, two);
      two.of_b.step();
      two.of_b.zero_grad();
    });
    EXPECT_NE(of_another.find("a GradScaler ends, and this rank changed parameter b."), std::string::npos)
        << of_another;
    const std::string of_used = warning([&](Side& s, Two& two) {
      train(s, two);
      two.of_a.step();
      two.of_a.zero_grad();
    });
    EXPECT_NE(of_used.find(std::string("a GradScaler ends, and this rank") + kAgain), std::string::npos) << of_used;
    const std::string of_infinity = warning([&](Side& s, Two& two) {
      (s.scaler.scale(two.loss(0)) * kInfinity).backward();
      s.scaler.unscale(two.of_a);
      s.scaler.update();
      two.of_a.step();
      two.of_a.zero_grad();
    });
    EXPECT_NE(of_infinity.find(std::string("a GradScaler ends, and this rank") + kStepped), std::string::npos)
        << of_infinity;
  });
}

}  // namespace
}  // namespace lockstep::unnoticed_steps_test
