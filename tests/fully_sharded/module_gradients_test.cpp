// The module's own .grad says where gradients are; weights that change under a backward, and what one rank alone does
// wrong, are told to all ranks.

#include <lockstep/fully_sharded_data_parallel.h>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/told_in_time.h"

namespace lockstep::module_gradients_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::SGDOptions;

const Engine kAll[] = {
    {2, "shm"}, {2, "gloo"}, {2, "hierarchical", "ab"}, {3, "hierarchical", "abc"}, {4, "hierarchical", "aabb"}};

/// What this rank is told, in time; empty if nothing.
std::string told(const std::function<void()>& body) {
  const auto start = Clock::now();
  try {
    body();
  } catch (const std::exception& error) {
    expect_told_in_time(start);
    return error.what();
  }
  return "";
}

void expect(const std::string& said, const std::string& words) {
  EXPECT_NE(said.find(words), std::string::npos) << "it says: " << said;
}

struct Training {
  explicit Training(const Context& context) : model(net, context), optimizer(model, SGDOptions(0.1)) {}
  at::Tensor loss(int step, int rank = 0) {
    const at::Tensor text = text_of(step, rank);
    return loss_of(model(text), text);
  }
  SmallGpt net{3};
  FullyShardedDataParallel<SmallGpt> model;
  ZeroRedundancyOptimizer<torch::optim::SGD> optimizer;
};

TEST(ModuleGradients, AreClosed) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training training(context);
      training.loss(0).backward();
      const std::string words = "is not in the module, but in the parts that the optimizer steps";
      for (const at::Tensor& parameter : training.net->parameters()) {
        if (!parameter.requires_grad()) continue;
        ASSERT_TRUE(parameter.grad().defined());
        EXPECT_EQ(parameter.grad().sizes(), parameter.sizes());
      }
      at::Tensor gradient = training.net->head->weight.grad();
      expect(told([&] { gradient.mul_(2); }), words);
      expect(told([&] { (void)gradient.sum().item<float>(); }), words);
      expect(told([&] { torch::nn::utils::clip_grad_norm_(training.net->parameters(), 1.0); }), words);
      expect(told([&] { training.net->zero_grad(/*set_to_none=*/false); }), words);
      training.loss(1).backward();
      training.optimizer.step();
    });
}

TEST(ModuleGradients, TheModulesZeroGradClearsAsTheOptimizers) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training one(context), other(context), never(context);
      for (int step = 0; step < 4; ++step) {
        one.net->zero_grad();
        other.optimizer.zero_grad();
        for (Training* training : {&one, &other, &never}) {
          training->loss(step, context.rank()).backward();
          if (step == 2) training->loss(step + 9, context.rank()).backward();
          training->optimizer.step();
        }
      }
      const auto hash_of_one = hash(one.model.state_dict());
      EXPECT_EQ(hash_of_one, hash(other.model.state_dict()));
      const auto hash_of_never = hash(never.model.state_dict());
      if (context.rank() == 0) {
        EXPECT_NE(hash_of_one, hash_of_never);
      }
      one.net->zero_grad();
      one.optimizer.step();  // nothing to step
      EXPECT_EQ(hash_of_one, hash(one.model.state_dict()));
    });
}

TEST(ModuleGradients, ThatOneRankClearsOrSetsAreTold) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      for (const int way : {0, 1, 2, 3}) {
        SCOPED_TRACE(way);
        Training training(context);
        training.loss(0).backward();
        if (context.rank() == 1) {
          if (way < 3)
            training.net->layers->ptr(1)->zero_grad();
          else
            training.net->head->bias.mutable_grad() = at::ones(7);
        }
        const std::string said = told([&] {
          if (way == 0) training.optimizer.step();
          if (way == 1) (void)training.model.clip_grad_norm(1);
          if (way >= 2) training.loss(1).backward();
        });
        expect(said, way == 3 ? "rank 1: FullyShardedDataParallel: the .grad of head.bias was set" : "layers.1.");
      }
    });
}

TEST(ModuleGradients, WeightsThatChangeBeforeTheirBackwardAreTold) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      for (const bool loads : {false, true}) {
        Training training(context);
        SmallGpt other(3);
        training.loss(0).backward();
        at::Tensor x = training.net->tokens(text_of(1, 0));
        for (size_t i = 0; i < 3; ++i) x = training.net->layers->at<detail::Unit<BlockImpl>>(i).forward(x);
        const at::Tensor loss = x.sum();  // autograd itself tells of the head
        if (loads)
          training.model.load_state_dict(state_dict(*other));
        else
          training.optimizer.step();
        expect(told([&] { loss.backward(); }),
               "the parameters of `layers.2` were changed between its forward and its backward");
      }
    });
}

TEST(ToldToAll, AParameterGroupThatIsAdded) {
  for (const Engine& engine : kAll)
    run_alike(engine, [](Context& context) {
      Training training(context);
      training.loss(0).backward();
      if (context.rank() == 1) training.optimizer.add_param_group(training.net->head->parameters());
      expect(told([&] { training.optimizer.step(); }), "that is not part of the model, as after add_param_group()");
    });
}

/// What all ranks are told when only rank 1 does wrong: in the middle of a forward or backward, too.
TEST(ToldToAll, WhatOneRankDoes) {
  for (const Engine& engine : kAll)
    for (const int way : {0, 1, 2, 3, 4, 5})
      run_alike(engine, [way](Context& context) {
        SCOPED_TRACE(way);
        Training training(context);
        const bool odd = context.rank() == 1;
        training.loss(0).backward();
        training.optimizer.step();
        std::string words;
        const std::string said = told([&] {
          if (way == 0) {
            words = "rank 1: FullyShardedDataParallel: head.bias was changed";
            if (odd) training.net->head->bias.set_data(training.net->head->bias.clone());
            (void)training.model.state_dict();
          } else if (way == 1) {
            words = "rank 1: FullyShardedDataParallel: the gradient of tokens.weight is sparse";
            training.net->tokens->options.sparse(odd);
            training.optimizer.zero_grad();
            training.loss(1).backward();
          } else if (way == 2) {
            words = "requires grad itself";
            training.optimizer.zero_grad();
            training.loss(1).backward({}, /*retain_graph=*/odd, /*create_graph=*/odd);
          } else if (way == 3) {
            words = "`layers.0` was called a second time";
            const at::Tensor loss = training.loss(1);
            if (odd) (void)training.loss(2);
            loss.backward();
          } else if (way == 4) {
            words = "load_state_dict() was called within a backward";
            const at::Tensor loss = training.loss(1) * 1;
            if (odd) loss.register_hook([&](const at::Tensor&) { training.model.load_state_dict(StateDict()); });
            training.optimizer.zero_grad();
            loss.backward();
          } else {
            words = "a second time (retain_graph)";
            const at::Tensor loss = training.loss(1);
            loss.backward({}, /*retain_graph=*/true);
            if (odd)
              loss.backward();
            else
              training.optimizer.step();
          }
        });
        expect(said, words);
      });
}

}  // namespace
}  // namespace lockstep::module_gradients_test
