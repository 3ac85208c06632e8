// What a program does with parts and their gradients by itself: each rank has other elements, so most of it is wrong,
// and on one rank only never right.

#include <lockstep/fully_sharded_data_parallel.h>

#include <gtest/gtest.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/golden_message.h"
#include "support/told_in_time.h"

namespace lockstep::edited_parts_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::SGDOptions;

struct Training {
  explicit Training(const Context& context)
      : odd(context.rank() == 0), model(net, context), optimizer(model, SGDOptions(0.1)) {}
  at::Tensor loss(int step = 0) { return loss_of(model(text_of(step, 0)), text_of(step, 0)); }
  /// A part of this rank that has elements and, after a backward, a gradient.
  at::Tensor part() const {
    for (const at::Tensor& part : model.parts())
      if (part.numel() > 0) return part;
    return {};
  }
  const bool odd;  ///< of small models the last ranks may hold nothing
  SmallGpt net{3};
  FullyShardedDataParallel<SmallGpt> model;
  ZeroRedundancyOptimizer<torch::optim::SGD> optimizer;
};

/// What this rank is told, in time; empty if nothing.
std::string told(const std::function<void()>& body) {
  const auto start = Clock::now();
  try {
    body();
  } catch (const c10::Error& error) {
    expect_told_in_time(start);
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    expect_told_in_time(start);
    return error.what();
  }
  return "";
}

struct Program {
  std::string name;
  std::function<void(Training&)> run;
};

const std::vector<Program>& programs() {
  static const std::vector<Program> kPrograms{
      {"norm_of_parts",
       [](Training& one) {
         torch::nn::utils::clip_grad_norm_(one.model.parts(), 1e-3);
         one.optimizer.step();
       }},
      {"gradient_changed_on_one_rank",
       [](Training& one) {
         if (one.odd) one.part().mutable_grad().mul_(2);
         one.optimizer.step();
       }},
      {"gradient_changed_before_clipping",
       [](Training& one) {
         if (one.odd) one.part().mutable_grad().mul_(2);
         (void)one.model.clip_grad_norm(1);
       }},
      {"gradient_changed_before_a_backward",
       [](Training& one) {
         if (one.odd) one.part().mutable_grad().mul_(2);
         one.loss(1).backward();
       }},
      {"gradients_zeroed_on_one_rank",
       [](Training& one) {
         one.optimizer.step();
         if (one.odd) one.optimizer.zero_grad(/*set_to_none=*/false);
         one.loss(1).backward();
       }},
      {"gradients_cleared_on_one_rank",
       [](Training& one) {
         if (one.odd) one.optimizer.zero_grad();
         one.optimizer.step();
       }},
      {"gradients_cleared_on_one_rank_before_clipping",
       [](Training& one) {
         if (one.odd) one.optimizer.zero_grad();
         (void)one.model.clip_grad_norm(1);
       }},
      {"part_changed_on_one_rank",
       [](Training& one) {
         one.optimizer.step();
         if (one.odd) one.part().detach().mul_(2);
         one.loss(1).backward();
       }},
      {"other_optimizer_over_parts",
       [](Training& one) {
         torch::optim::SGD other(one.model.parts(), SGDOptions(0.1));
         other.step();
         one.loss(1).backward();
       }},
      {"other_optimizer_over_groups",
       [](Training& one) {
         std::vector<torch::optim::OptimizerParamGroup> groups;
         groups.emplace_back(one.net->parameters());
         std::erase_if(groups[0].params(), [](const at::Tensor& tensor) { return !tensor.requires_grad(); });
         torch::optim::SGD other(one.model.parts_of(groups), SGDOptions(0.1));
         other.step();
         (void)one.model.hash();
       }},
  };
  return kPrograms;
}

TEST(EditedParts, AreToldOnAllRanks) {
  for (const Engine& engine : kTellingEngines)
    run_alike(engine, [&](Context& context) {
      for (const Program& program : programs()) {
        const std::string of = name_of(engine) + ", rank " + std::to_string(context.rank()) + " of " + program.name;
        Training training(context);
        training.loss().backward();
        context.group().barrier();
        const std::string said = told([&] { program.run(training); });
        const std::string golden = golden_message("tests/fully_sharded/wrong_programs.txt", program.name, "");
        EXPECT_TRUE(!said.empty() && matches_golden(said, golden)) << of << " says\n" << said << "\nnot\n" << golden;
        context.group().barrier();
      }
    });
}

TEST(EditedParts, WhatAllRanksMayDo) {
  for (const Engine& engine : kTellingEngines)
    run_alike(engine, [](Context& context) {
      Training one(context), other(context);
      GradScaler scaler(GradScalerOptions{.init_scale = 1024});
      for (int step = 0; step < 3; ++step) {
        one.loss(step).backward();
        (void)one.model.clip_grad_norm(0.05);
        one.optimizer.step();
        one.optimizer.zero_grad(/*set_to_none=*/false);
        scaler.scale(other.loss(step)).backward();
        scaler.unscale(other.optimizer);
        (void)other.model.clip_grad_norm(0.05);
        EXPECT_TRUE(scaler.step(other.optimizer));
        scaler.update();
        other.optimizer.zero_grad();
      }
      EXPECT_EQ(one.model.hash(), other.model.hash());
    });
}

}  // namespace
}  // namespace lockstep::edited_parts_test
