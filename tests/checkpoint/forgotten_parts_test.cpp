#include <gtest/gtest.h>

#include <filesystem>

#include <ATen/ATen.h>
#include <torch/nn.h>
#include <torch/optim.h>

#include <lockstep/checkpointer.h>
#include <lockstep/data_loader.h>
#include <lockstep/diloco.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/running_statistics.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "data/numbers.h"
#include "support/heard_warnings.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// What a training uses and a resuming Checkpointer does not keep is named at the first save.

namespace lockstep {
namespace {

using testing::Engine;
using testing::run_ranks;

/// A training with everything that has state, of which `added` says what the Checkpointer is given.
struct ForgetfulTraining {
  ForgetfulTraining(Context& context, const std::string& folder)
      : group(context.group()),
        model(net, context),
        ema(*net),
        scaler(group, {.init_scale = 4}),
        train(testing::Numbers(16), context, {.batch_size = 2, .shuffle = true}),
        check(testing::Numbers(16), context, {.batch_size = 2}),
        checkpointer(folder, group) {}

  template <typename Optimizer>
  std::vector<std::string> warnings_of(Optimizer& optimizer, const std::string& added, bool resumes = true) {
    LRScheduler schedule(optimizer, constant_lr(0.5, 2));
    const auto adds = [&](const std::string& part) { return added.find(part) != std::string::npos; };
    checkpointer.add("model", model).add("step_count", step);
    if (adds("optimizer")) checkpointer.add("optimizer", optimizer);
    if (adds("loader")) checkpointer.add("loader", train);
    if (adds("ema")) checkpointer.add("ema", ema);
    if (adds("scaler")) checkpointer.add("scaler", scaler);
    if (adds("schedule")) checkpointer.add("schedule", schedule);
    if (adds("statistics")) checkpointer.add("statistics", *statistics);
    if (resumes) checkpointer.resume();
    const testing::HeardWarnings heard;
    for (auto& [data, target] : train) {
      const at::Tensor rows = data.to(at::kFloat).view({-1, 1});
      statistics->update(rows, group);
      optimizer.zero_grad();
      scaler.scale(model(rows).sum()).backward();
      scaler.step(optimizer);
      scaler.update();
      schedule.step();
      ema.update();
      for (const torch::NoGradGuard no_grad; auto& batch : check) static_cast<void>(batch);
      checkpointer.save(++step);
    }
    checkpointer.finish();
    return heard.texts();
  }

  const Group group;
  torch::nn::Linear net{1, 1};
  DistributedDataParallel<torch::nn::Linear> model;
  RunningStatistics statistics{std::vector<int64_t>{1}};
  Ema ema;
  GradScaler scaler;
  DataLoader train, check;
  int64_t step = 0;
  Checkpointer checkpointer;
};

class ForgottenParts : public ::testing::TestWithParam<Engine> {
 protected:
  std::string folder() const { return (temporary_.path() / "checkpoints").string(); }
  /// Expects a warning for each of `names`, on rank 0 alone.
  static void expect_named(const Context& context, const std::vector<std::string>& texts,
                           const std::vector<std::string>& names) {
    std::string all;
    for (const std::string& text : texts) all += text + '\n';
    EXPECT_EQ(texts.size(), context.rank() == 0 ? names.size() : 0) << all;
    if (context.rank() != 0) return;
    for (const std::string& name : names) EXPECT_NE(all.find(name), std::string::npos) << name << " in: " << all;
  }

 private:
  TemporaryFolder temporary_;
};
INSTANTIATE_TEST_SUITE_P(Engines, ForgottenParts,
                         ::testing::Values(Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"}, Engine{3, "gloo"}),
                         [](const auto& instance) { return testing::name_of(instance.param); });

class ForgottenMachines : public ForgottenParts {};
INSTANTIATE_TEST_SUITE_P(Engines, ForgottenMachines, ::testing::Values(Engine{2, "hierarchical", "ab"}),
                         [](const auto& instance) { return testing::name_of(instance.param); });

TEST_P(ForgottenParts, AreNamedOnceWithTheLineThatAddsThem) {
  run_ranks(GetParam(), [&](Context& context) {
    ForgetfulTraining training(context, folder());
    torch::optim::AdamW optimizer(training.net->parameters(), 1e-3);
    expect_named(context, training.warnings_of(optimizer, ""),
                 {"an optimizer that the training steps, so a resumed run would begin it anew",
                  "Add it before resume(): checkpointer.add(\"loader\", loader)", "checkpointer.add(\"ema\", ema)",
                  "checkpointer.add(\"scaler\", scaler)", "checkpointer.add(\"schedule\", scheduler)",
                  "checkpointer.add(\"statistics\", *statistics)"});
  });
}

TEST_P(ForgottenParts, AreNamedAlone) {
  run_ranks(GetParam(), [&](Context& context) {
    ForgetfulTraining training(context, folder());
    torch::optim::AdamW optimizer(training.net->parameters(), 1e-3);
    expect_named(context, training.warnings_of(optimizer, "optimizer loader ema schedule statistics"),
                 {"a GradScaler whose step() is called"});
  });
}

TEST_P(ForgottenParts, IncludeAnOptimizerMadeFromTheModel) {
  run_ranks(GetParam(), [&](Context& context) {
    ForgetfulTraining training(context, folder());
    ZeroRedundancyOptimizer optimizer(training.model, torch::optim::AdamWOptions(1e-3));
    expect_named(context, training.warnings_of(optimizer, "loader ema scaler schedule statistics"),
                 {"an optimizer that the training steps"});
  });
}

TEST_P(ForgottenParts, AreNoneWhereAllAreAdded) {
  run_ranks(GetParam(), [&](Context& context) {
    ForgetfulTraining training(context, folder());
    ZeroRedundancyOptimizer optimizer(training.model, torch::optim::AdamWOptions(1e-3));
    expect_named(context, training.warnings_of(optimizer, "optimizer loader ema scaler schedule statistics"), {});
  });
}

TEST_P(ForgottenParts, AreNoneForACheckpointerThatDoesNotResume) {
  run_ranks(GetParam(), [&](Context& context) {
    ForgetfulTraining training(context, folder());
    torch::optim::AdamW optimizer(training.net->parameters(), 1e-3);
    expect_named(context, training.warnings_of(optimizer, "", /*resumes=*/false), {});
  });
}

TEST_P(ForgottenParts, IncludeAnOptimizerThatTheLibraryHasNotSeen) {
  run_ranks(GetParam(), [&](Context& context) {
    torch::nn::Linear net(1, 1);
    DistributedDataParallel model(net, context);
    torch::optim::Adam optimizer(net->parameters(), 1e-3);
    const auto warnings_of = [&](bool has_optimizer) {
      const testing::HeardWarnings heard;
      Checkpointer checkpointer(folder() + (has_optimizer ? "1" : "0"), context.group());
      checkpointer.add("model", model);
      if (has_optimizer) checkpointer.add("optimizer", optimizer);
      checkpointer.resume();
      for (int64_t step = 1; step < 3; ++step) {
        optimizer.zero_grad();
        model(at::ones({2, 1})).sum().backward();
        optimizer.step();
        checkpointer.save(step);
      }
      checkpointer.finish();
      return heard.texts();
    };
    expect_named(context, warnings_of(false), {"an optimizer (its momentum, moments and learning rate) for the model"});
    expect_named(context, warnings_of(true), {});
  });
}

TEST_P(ForgottenParts, AreNoneThatBelongToASavedModule) {
  run_ranks(GetParam(), [&](Context& context) {
    torch::nn::ModuleDict agent;
    RunningStatistics statistics(std::vector<int64_t>{1});
    agent->register_module("statistics", statistics.ptr());
    Checkpointer checkpointer(folder(), context.group());
    checkpointer.add("agent", *agent).resume();
    const testing::HeardWarnings heard;
    statistics->update(at::ones({2, 1}), context.group());
    checkpointer.save(1);
    checkpointer.finish();
    expect_named(context, heard.texts(), {});
  });
}

TEST_P(ForgottenParts, AreNoneWhoseStateThePartOfAProgramTakes) {
  run_ranks(GetParam(), [&](Context& context) {
    torch::nn::Linear net(1, 1);
    DistributedDataParallel model(net, context);  // equal weights
    Ema ema(*net);
    Checkpointer checkpointer(folder(), context.group());
    checkpointer.add("mine", {.save = [&] { return ema.state_dict(); },
                              .load = [&](const c10::IValue& state) { ema.load_state_dict(state); }});
    checkpointer.resume();
    const testing::HeardWarnings heard;
    ema.update();
    Ema gone(*net);
    checkpointer.save(1);
    {
      Ema brief(*net);
      brief.update();
    }
    checkpointer.save(2);
    checkpointer.finish();
    expect_named(context, heard.texts(), {});
  });
}

TEST_P(ForgottenMachines, IncludeADiLoCo) {
  run_ranks(GetParam(), [&](Context& context) {
    torch::nn::Linear net(1, 1);
    DistributedDataParallel model(net, context.group().on_this_machine());
    torch::optim::SGD optimizer(net->parameters(), 1e-3);
    DiLoCo diloco(model, context, {.sync_every = 2});
    Checkpointer checkpointer(folder(), context.group());
    checkpointer.add("model", *net, Checkpointer::Scope::kEachRank)
        .add("optimizer", optimizer, Checkpointer::Scope::kEachRank)
        .resume();
    const testing::HeardWarnings heard;
    model(at::ones({2, 1})).sum().backward();
    optimizer.step();
    diloco.step();
    checkpointer.save(1);
    checkpointer.finish();
    expect_named(context, heard.texts(), {"checkpointer.add(\"diloco\", diloco)"});
    static_cast<void>(diloco.state_dict());
  });
}

}  // namespace
}  // namespace lockstep
