#include <gtest/gtest.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "checkpoint/failure.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "trainer/waves.h"

// A Trainer whose machines train by themselves, against the same loop by hand: the same bits.

namespace lockstep::diloco_trainer_test {
namespace {

using testing::Engine;
using testing::run_ranks;
using testing::Waves;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

const Engine kMachines[] = {{2, "gloo", "ab"}, {4, "hierarchical", "aabb"}, {3, "hierarchical", "aab"}};
const DiLoCoOptions kDiLoCo{.sync_every = 4, .fragments = 2, .overlap_steps = 1, .wire = Wire::kInt8};
constexpr int kEpochs = 3;

torch::nn::Sequential make_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(4, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
}
std::string weights(torch::nn::Sequential& net) { return hash(state_dict(*net)); }
DataLoader training_data(const Context& context) {
  return {Waves(64), context, {.batch_size = 3, .shuffle = true, .drop_last = true}};
}

std::string train(const Context& context, TrainerOptions options, int interrupt_after = -1) {
  options.epochs = kEpochs;
  options.clip_grad_norm = 0.5;
  options.progress = false;
  options.schedule = [](int64_t steps) { return cosine_annealing_lr(steps); };
  DataLoader data = training_data(context), test(Waves(64), context, {.batch_size = 10, .exactly_once = true});
  torch::nn::Sequential net = make_net();
  AdamW optimizer(net->parameters(), AdamWOptions(0.02));
  Trainer trainer(net.ptr(), optimizer, context, options);
  Metrics metrics;
  Mean& error = metrics.add("error", Mean());
  trainer.evaluate_on(test, metrics, [&](Batch& batch) {
    error.update(torch::mse_loss(net->forward(batch.data), batch.target), batch.data.size(0));
  });
  trainer.on_epoch([&](const EpochResult&) {
    const std::string mine = weights(net);
    for (const std::string& other : context.group().all_gather_bytes(mine))
      EXPECT_EQ(other, mine) << "machines are evaluated and saved while they differ";
  });
  int calls = 0;
  trainer.fit(data, [&](Batch& batch) {
    if (++calls == interrupt_after) throw std::runtime_error("interrupted");
    return torch::mse_loss(net->forward(batch.data), batch.target);
  });
  return weights(net);
}

std::string train_by_hand(const Context& context) {
  DataLoader data = training_data(context);
  torch::nn::Sequential net = make_net();
  AdamW optimizer(net->parameters(), AdamWOptions(0.02));
  DistributedDataParallel model(net, context.group().on_this_machine());
  DiLoCo diloco(model, context, kDiLoCo);
  LRScheduler scheduler(optimizer, cosine_annealing_lr(kEpochs * data.size()));
  for ([[maybe_unused]] const int epoch : data.epochs(kEpochs)) {
    for (auto& batch : data) {
      optimizer.zero_grad();
      torch::mse_loss(net->forward(batch.data), batch.target).backward();
      model.clip_grad_norm(0.5);
      optimizer.step();
      diloco.step();
      scheduler.step();
    }
    diloco.finish();
  }
  return weights(net);
}

TEST(DiLoCoTrainer, HasTheBitsOfALoopByHand) {
  for (const Engine& engine : kMachines) {
    SCOPED_TRACE(name_of(engine));
    run_ranks(engine, [](Context& context) {
      const std::string expected = train_by_hand(context);
      EXPECT_EQ(train(context, {.diloco = kDiLoCo}), expected);
      EXPECT_NE(train(context, {}), expected) << "every step was synchronised";
    });
  }
}

TEST(DiLoCoTrainer, ResumesInTheMiddleOfARound) {
  for (const Engine& engine : kMachines) {
    SCOPED_TRACE(name_of(engine));
    const TemporaryFolder folder;
    run_ranks(engine, [&](Context& context) {
      const auto options = [&](const char* name) {
        return TrainerOptions{.ema = EmaOptions{.decays = {0.5}},
                              .diloco = kDiLoCo,
                              .folder = folder.path() / name,
                              .checkpoints = {.every_steps = 3, .asynchronous = false}};
      };
      const std::string expected = train(context, options("whole"));
      for (const int calls : {6, 9}) {
        const std::string name = "cut" + std::to_string(calls);
        EXPECT_THROW(train(context, options(name.c_str()), calls), std::runtime_error);
        context.group().barrier();
        EXPECT_EQ(train(context, options(name.c_str())), expected) << "interrupted in step " << calls;
      }
    });
  }
}

TEST(DiLoCoTrainer, OptionsThatDifferOrAreWrongAreRefusedOnAllRanks) {
  run_ranks({4, "hierarchical", "aabb"}, [](Context& context) {
    const auto said = [&](TrainerOptions options) { return testing::failure([&] { train(context, options); }); };
    EXPECT_NE(said({.diloco = DiLoCoOptions{.sync_every = context.rank() == 3 ? 5 : 4}}).find("sync_every"),
              std::string::npos);
    EXPECT_THROW(train(context, {.diloco = DiLoCoOptions{.sync_every = 0}}), c10::Error);
    const bool odd = context.rank() == 3;
    EXPECT_NE(said(odd ? TrainerOptions{} : TrainerOptions{.diloco = kDiLoCo})
                  .find("Trainer: TrainerOptions::diloco is given on ranks 0-2, and not on rank 3"),
              std::string::npos);
    EXPECT_NE(said(odd ? TrainerOptions{.diloco = kDiLoCo} : TrainerOptions{})
                  .find("Trainer: TrainerOptions::diloco is given on rank 3, and not on ranks 0-2"),
              std::string::npos);
  });
}

TEST(DiLoCoTrainer, AResumeWithTheOptionOnOneSideOnlyNamesIt) {
  const Engine engine{4, "hierarchical", "aabb"};
  const TemporaryFolder folder;
  run_ranks(engine, [&](Context& context) {
    const auto options = [&](const char* name, bool separately) {
      TrainerOptions made{.folder = folder.path() / name};
      if (separately) made.diloco = kDiLoCo;
      return made;
    };
    for (const bool before : {true, false}) {
      const char* const name = before ? "with" : "without";
      train(context, options(name, before));
      const std::string said = testing::failure([&] { train(context, options(name, !before)); });
      const char* const model = before ? "`model`: not in the checkpoint once for all ranks, but for each rank"
                                       : "`model`: not in the checkpoint for each rank, but once for all ranks";
      const char* const diloco =
          before ? "`diloco`: in the checkpoint, but not a part of this run" : "`diloco`: not in the checkpoint";
      EXPECT_NE(said.find(model), std::string::npos) << said;
      EXPECT_NE(said.find(diloco), std::string::npos) << said;
    }
  });
}

}  // namespace
}  // namespace lockstep::diloco_trainer_test
