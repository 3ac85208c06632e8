#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "checkpoint/failure.h"
#include "data_parallel/models.h"
#include "data_parallel/recompute.h"
#include "support/ranks.h"
#include "train/scaler_side.h"

// Programs whose gradients would not have the scale that a GradScaler divides them by: each is an error on all ranks,
// before a parameter is stepped. Beside them odd programs that are right.

namespace lockstep::wrong_scalers_test {
namespace {

using namespace testing;  // NOLINT

constexpr const char* kOne =
    "GradScaler: {odd} ran 1 of 2 backward passes without scale() since the last update(), and {rest} with it, so the "
    "gradients have different scales. Call scaler.scale(loss).backward() on every rank and in every pass";
constexpr const char* kOneEach =
    "GradScaler: {all} ran 1 of 2 backward passes without scale() since the last update(), so the gradients have "
    "different scales. ";
constexpr const char* kNone =
    "GradScaler: {all} ran backward without scale() since the last update(), so the gradients do not have the scale by "
    "which they would be divided. ";
constexpr const char* kDisabled =
    "GradScaler: {odd} made it with enabled = false, and {rest} with enabled = true, so gradients with the scale ";
constexpr const char* kTwice =
    "GradScaler: {all} gave scale() a value that was computed from a loss that scale() had already scaled, ";
constexpr const char* kWaits = " while the gradients of 1 backward pass of accumulate() wait in .grad and ";
constexpr const char* kClipped =
    "clip_grad_norm: the gradients still have the scale of a GradScaler, so their norm would have it, too; call ";
constexpr const char* kBeside =
    "GradScaler: {all} added a value without scale() to a loss that scale() had scaled, in 1 backward pass, so ";
constexpr const char* kCleared =
    "GradScaler: {odd} cleared gradients between backward() and the scaler's step, as zero_grad() does, but not the "
    "same ";

Programs of_passes() {
  return {
      {"one_pass_of_two_on_one_rank", kOne, [](Side& s) { s.accumulate(s.optimizer, !s.odd); }},
      {"one_pass_of_two_on_all_ranks", kOneEach, [](Side& s) { s.accumulate(s.optimizer, false); }},
      {"one_pass_of_two_before_a_sharded_step", kOne,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.accumulate(sharded, !s.odd);
       }},
      {"one_pass_of_two_that_both_reduce", kOneEach,
       [](Side& s) {
         s.backward(false);
         s.backward(true, 1);
         s.scaler.step(s.optimizer);
       }},
      {"one_pass_of_two_that_a_sharded_step_sums", kOneEach,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.backward(true);
         s.backward(false, 1);
         s.scaler.step(sharded);
       }},
      {"scaled_in_vain", kNone,
       [](Side& s) {
         s.scaler.scale(s.loss());
         s.backward(false);
         s.scaler.step(s.optimizer);
       }},
      {"gradients_of_the_last_step",
       "GradScaler: {all} added the gradients of 1 backward pass to those of 1 backward pass that a step had used, ",
       [](Side& s) {
         s.backward(true);
         s.scaler.step(s.optimizer);
         s.scaler.update();
         s.before = s.weights();
         s.backward(true, 1);  // without zero_grad()
         s.scaler.step(s.optimizer);
       }},
      {"never_scaled", kNone,
       [](Side& s) {
         s.train(s.optimizer);
         s.before = s.weights();
         s.backward(false);
         s.scaler.unscale(s.optimizer);
       }},
      {"never_scaled_without_a_replica", kNone,
       [](Side& s) {
         const at::Tensor weight = at::ones({2}).requires_grad_();
         torch::optim::SGD own({weight}, 0.1);
         GradScaler scaler(s.context.group());
         weight.sum().backward();
         scaler.step(own);
       }},
      {"scaled_by_hand", kNone,
       [](Side& s) {
         (s.loss() * s.scaler.get_scale()).backward();
         s.scaler.step(s.optimizer);
       }},
      {"enabled_on_some_ranks", kDisabled,
       [](Side& s) {
         s.before = s.weights();
         GradScaler scaler({.enabled = !s.odd});
         scaler.scale(s.loss()).backward();
         scaler.step(s.optimizer);
       }},
      {"enabled_on_some_ranks_before_unscale", kDisabled,
       [](Side& s) {
         s.before = s.weights();
         GradScaler scaler({.enabled = !s.odd});
         scaler.scale(s.loss()).backward();
         scaler.unscale(s.optimizer);
         s.replica.clip_grad_norm(1);
         scaler.step(s.optimizer);
       }},
      {"enabled_on_some_ranks_before_a_sharded_step", kDisabled,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         GradScaler scaler({.enabled = !s.odd});
         scaler.scale(s.loss()).backward();
         scaler.step(sharded);
       }},
      {"enabled_on_no_rank", "",
       [](Side& s) {
         GradScaler scaler({.enabled = false});
         for (int step = 0; step < 2; ++step) {
           scaler.scale(s.loss(step)).backward();
           scaler.unscale(s.optimizer);
           EXPECT_TRUE(scaler.step(s.optimizer));
           scaler.update();
           s.optimizer.zero_grad();
         }
       }},
      {"scaled_twice", kTwice,
       [](Side& s) {
         s.scaler.scale(s.scaler.scale(s.loss())).backward();
         s.scaler.step(s.optimizer);
       }},
      {"scaled_twice_on_one_rank",
       "GradScaler: {odd} gave scale() a value that was computed from a loss that scale() had already scaled, ",
       [](Side& s) {
         const at::Tensor loss = s.scaler.scale(s.loss());
         (s.odd ? s.scaler.scale(loss) : loss).backward();
         s.scaler.step(s.optimizer);
       }},
      {"scaled_twice_in_a_sum", kTwice,

       [](Side& s) {
         s.scaler.scale((s.loss() + s.scaler.scale(s.loss(1))) / 2).backward();
         s.scaler.step(s.optimizer);
       }},
      {"scaled_in_part", kBeside,
       [](Side& s) {
         (s.scaler.scale(s.loss()) + s.loss(1)).backward();
         s.scaler.step(s.optimizer);
       }},
      {"scaled_in_part_of_a_mean", kBeside,
       [](Side& s) {
         ((s.scaler.scale(s.loss()) * 0.5 + s.loss(1)) / 2).backward();
         s.scaler.unscale(s.optimizer);
       }},
      {"scaled_by_another", "GradScaler: {all} called step() with gradients of 1 backward pass whose loss another ",
       [](Side& s) {
         GradScaler other;
         other.scale(s.loss()).backward();
         s.scaler.step(s.optimizer);
       }},
  };
}

Programs of_calls() {
  return {
      {"unscaled_on_one_rank",
       "GradScaler: {odd} called unscale(), and {rest} step() without it; call unscale() before step()",
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         if (s.odd) {
           s.scaler.unscale(s.optimizer);
           s.replica.clip_grad_norm(0.1);
         }
         s.scaler.step(s.optimizer);
       }},
      {"stepped_within_accumulate", std::string("GradScaler: this rank called step()") + kWaits,
       [](Side& s) {
         s.before = s.weights();
         const auto accumulation = s.replica.accumulate(2);
         s.backward(true);
         s.scaler.step(s.optimizer);
       }},
      {"unscaled_within_accumulate", std::string("GradScaler: {all} called unscale()") + kWaits,
       [](Side& s) {
         GradScaler scaler(s.context.group());
         const auto accumulation = s.replica.accumulate(3);
         scaler.scale(s.loss()).backward();
         scaler.unscale(s.optimizer);
       }},
      {"stepped_after_an_accumulation_that_was_cut_off", std::string("GradScaler: this rank called step()") + kWaits,
       [](Side& s) {
         s.before = s.weights();
         if (const auto accumulation = s.replica.accumulate(2); true) s.backward(true);
         s.scaler.step(s.optimizer);
       }},
      {"cleared_on_one_rank", kCleared,
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         if (s.odd) s.optimizer.zero_grad();
         s.scaler.step(s.optimizer);
       }},
      {"set_to_zero_on_one_rank", kCleared,
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         if (s.odd) s.optimizer.zero_grad(/*set_to_none=*/false);
         s.scaler.unscale(s.optimizer);
       }},
      {"cleared_on_one_rank_before_a_sharded_step", kCleared,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.backward(true);
         if (s.odd) sharded.zero_grad();
         s.scaler.step(sharded);
       }},
      {"clipped_before_unscale", kClipped,
       [](Side& s) {
         s.backward(true);
         s.replica.clip_grad_norm(0.1);
       }},
      {"clipped_before_unscale_and_a_sharded_step", kClipped,
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.backward(true);
         s.replica.clip_grad_norm(0.1);
       }},
      {"clipped_by_libtorch_before_unscale", "GradScaler: {all} changed the gradient of parameter ",
       [](Side& s) {
         s.before = s.weights();
         s.backward(true);
         torch::nn::utils::clip_grad_norm_(s.model->parameters(), 1e-3);
         s.scaler.step(s.optimizer);
       }},
      {"stepped_beside_the_scaler_before_it", "GradScaler: {all} changed parameter ",
       [](Side& s) {
         s.backward(true);
         s.optimizer.step();
         s.scaler.step(s.optimizer);
       }},
      {"stepped_beside_the_scaler_after_it",
       "GradScaler: this rank stepped an optimizer again after the scaler's step() had used ",
       [](Side& s) {
         torch::optim::AdamW adamw(s.model->parameters());
         s.backward(true);
         s.scaler.step(adamw);
         adamw.step();
         s.scaler.update();
       }},
      {"sharded_step_beside_the_scaler", "{all}: ZeroRedundancyOptimizer::step(): the gradients still have the scale ",
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.backward(true);
         sharded.step();
       }},
      {"updated_before_the_step", "GradScaler: {all} called step() after update(), with gradients of 1 backward pass ",
       [](Side& s) {
         s.backward(true);
         s.scaler.unscale(s.optimizer);
         s.scaler.update();
         s.before = s.weights();
         s.scaler.step(s.optimizer);
       }},
      {"updated_without_a_step_on_one_rank", "GradScaler: {odd} called update() without a step() or unscale() since ",
       [](Side& s) {
         GradScaler scaler(s.context.group());
         scaler.scale(s.loss()).backward();
         if (!s.odd) scaler.step(s.optimizer);
         scaler.update();
       }},
      {"updated_without_anything",
       "GradScaler: this rank called update() without a step() or unscale() since the last update() (optimizer.step() "
       "does not count: ",
       [](Side& s) { s.scaler.update(); }},
      {"skips_what_is_not_finite", "GradScaler: {all} set NonFinitePolicy::kSkip, which removes the gradients before ",
       [](Side& s) {
         s.replica.set_non_finite_policy(NonFinitePolicy::kSkip);
         s.backward(true);
         s.scaler.step(s.optimizer);
       }},
      {"an_undefined_loss", "GradScaler: scale() was given an undefined tensor; give it the loss",
       [](Side& s) { s.scaler.scale({}); }},
      {"no_backward",
       "GradScaler: no parameter of the optimizer has a gradient; call backward() first, and zero_grad(), which "
       "clears ",
       [](Side& s) {
         s.train(s.optimizer);
         s.scaler.step(s.optimizer);
       }},
  };
}

Programs that_are_right() {
  return {
      {"two_losses_in_one_backward", "",
       [](Side& s) {
         (s.scaler.scale(s.loss()) + s.scaler.scale(s.loss(1))).backward();
         s.scaler.scale(s.loss());
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"two_backward_passes_of_one_loss", "",
       [](Side& s) {
         const at::Tensor loss = s.scaler.scale(s.loss());
         loss.backward({}, /*retain_graph=*/true);
         loss.backward();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"a_pass_whose_gradients_were_cleared", "",
       [](Side& s) {
         for (const bool to_none : {false, true}) {
           s.backward(false);
           s.optimizer.zero_grad(to_none);
           s.backward(true);
           EXPECT_TRUE(s.scaler.step(s.optimizer));
           s.scaler.update();
           s.optimizer.zero_grad(to_none);
         }
       }},
      {"one_optimizer_of_two_goes_without", "",
       [](Side& s) {
         const auto other = make_model("plain"), third = make_model("plain");
         NamedTensors all;
         for (const auto& one : other->named_parameters()) all.emplace_back("other." + one.key(), one.value());
         for (const auto& one : third->named_parameters()) all.emplace_back("third." + one.key(), one.value());
         const DistributedDataParallel replica(all, s.context);
         auto scaled = make_sgd(*other), plain = make_sgd(*third);
         for (int step = 0; step < 3; ++step) {
           loss_of(*third, batch(step, s.context.rank()), 0, 0).backward();
           plain.step();
           plain.zero_grad();
           s.scaler.scale(loss_of(*other, batch(step, s.context.rank()), 0, 0)).backward();
           EXPECT_TRUE(s.scaler.step(scaled));
           s.scaler.update();
           scaled.zero_grad();
         }
       }},
      {"recomputed_activations", "",
       [](Side& s) {
         for (int step = 0; step < 2; ++step) {
           const at::Tensor x = batch(step, s.context.rank()).data.requires_grad_();
           Recompute::Segment segment = [&](const at::Tensor& input) { return s.model->forward(input, 0, 0); };
           s.scaler.scale(recompute(segment, x).square().mean()).backward();
           EXPECT_TRUE(s.scaler.step(s.optimizer));
           s.scaler.update();
           s.optimizer.zero_grad();
         }
       }},
      {"a_penalty_on_scaled_gradients", "",
       [](Side& s) {
         const at::Tensor x = batch(0, s.context.rank()).data.requires_grad_();
         const at::Tensor loss = s.model->forward(x, 0, 0).square().mean();
         const at::Tensor gradient = torch::autograd::grad({s.scaler.scale(loss)}, {x}, {}, true, true)[0];
         s.scaler.scale(loss + (gradient / s.scaler.get_scale()).square().sum()).backward();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"each_rank_by_itself", "",  // as post-local SGD steps
       [](Side& s) {
         const auto local = s.replica.no_sync();
         s.train(s.optimizer);
         s.train(s.optimizer);
       }},
      {"a_new_scale_before_the_first_step", "",
       [](Side& s) {
         GradScaler scaler(s.context.group());
         scaler.update(256);
         EXPECT_EQ(scaler.get_scale(), 256);
         scaler.scale(s.loss()).backward();
         EXPECT_TRUE(scaler.step(s.optimizer));
         scaler.update();
       }},
      {"an_unscaled_part_that_reaches_other_parameters", "",
       [](Side& s) {
         const auto other = make_model("plain");
         (s.scaler.scale(s.loss()) + loss_of(*other, batch(0, 0), 0, 0)).backward();
         EXPECT_TRUE(s.scaler.step(s.optimizer));
       }},
      {"cleared_on_all_ranks_and_clamped_after_the_step", "",
       [](Side& s) {
         for (int step = 0; step < 2; ++step) {
           s.backward(true, step);
           s.model->parameters().front().mutable_grad().reset();
           EXPECT_TRUE(s.scaler.step(s.optimizer));
           for (const at::Tensor& parameter : s.model->parameters()) parameter.data().clamp_(-0.1, 0.1);
           s.scaler.update();
           s.optimizer.zero_grad();
         }
       }},
      {"all_ranks_skip", "", [](Side& s) { s.leave_out(s.optimizer); }},
      {"all_ranks_skip_a_sharded_step", "",
       [](Side& s) {
         Sharded sharded(s.replica, torch::optim::SGDOptions(0.1));
         s.leave_out(sharded);
       }},
      {"all_ranks_skip_and_clip", "",
       [](Side& s) {
         s.replica.skip_step();
         s.scaler.unscale(s.optimizer);
         s.replica.clip_grad_norm(1);
         EXPECT_FALSE(s.scaler.step(s.optimizer));
         s.scaler.update();
         EXPECT_EQ(s.tracked(), 0);
       }},
  };
}

using WrongScalers = OfScalers;
INSTANTIATE_TEST_SUITE_P(Engines, WrongScalers, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(WrongScalers, PassesThatWereNotScaledOnce) { expect(of_passes()); }
TEST_P(WrongScalers, CallsThatDiffer) { expect(of_calls()); }
TEST_P(WrongScalers, OddProgramsThatAreRightAreNone) { expect(that_are_right()); }

/// Whose gradients leave .grad between the backward passes of a step.
void train_virtual_ranks(Context& context) {
  Side side(context);
  const int begin = context.virtual_block().first, shares = context.virtual_block().last - begin;
  const auto step = [&](const std::function<void(int share)>& take) {
    for (int share = 0; share < shares; ++share) {
      context.enter_virtual_rank(begin + share);
      take(share);
    }
    const bool stepped = side.scaler.step(side.optimizer);
    side.scaler.update();
    side.optimizer.zero_grad();
    return stepped;
  };
  const auto scaled = [&](int share) { side.backward(true, share); };
  EXPECT_TRUE(step(scaled));
  EXPECT_FALSE(step([&](int) { side.replica.skip_step(); }));
  EXPECT_TRUE(step([&](int share) { share == 0 && side.odd ? side.replica.skip_step() : scaled(share); }));
  const at::Tensor before = side.weights();
  const std::string last = std::to_string(context.world_size() - 1);
  const std::string said = failure([&] { step([&](int share) { side.backward(!side.odd || share > 0, share); }); });
  EXPECT_EQ(said.find("GradScaler: rank " + last + " ran 1 of " + std::to_string(shares) +
                      " backward passes without scale() since the last update(), and rank"),
            0u)
      << said;
  EXPECT_TRUE(side.weights().equal(before));
}

TEST(WrongScalersOfVirtualRanks, AreNamedAndRightOnesAreNone) {
  for (const char* backend : {"shm", "gloo"})
    for (const int world_size : {2, 3})
      run_ranks(world_size, train_virtual_ranks, std::chrono::seconds(60),
                {.seed = 7, .virtual_ranks = 6, .backend = backend, .announce = false});
}

}  // namespace
}  // namespace lockstep::wrong_scalers_test
