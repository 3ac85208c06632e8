#include <gtest/gtest.h>

#include <memory>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "support/ranks.h"
#include "support/temporary_folder.h"
#include "trainer/waves.h"

// The Trainer and the kit around it with an optimizer whose steps the ranks share out, against each rank stepping its
// own copy by the same kernels: the same bits.

namespace lockstep::sharded_trainer_test {
namespace {

using testing::run_ranks;
using testing::Waves;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

enum class Sharing { kAlone, kCopies, kShared };

struct Result {
  at::Tensor weights, moments;
  double score;
  int epochs;
};

Result train(const Context& context, Sharing sharing, TrainerOptions options) {
  options.progress = false;
  options.accumulate = 2;
  options.clip_grad_norm = 0.05;
  options.score = "error";
  options.schedule = [](int64_t steps) { return warm_up(2, cosine_annealing_lr(steps)); };
  DataLoader data(Waves(50), context, {.batch_size = 4, .shuffle = true, .drop_last = true});
  DataLoader test(Waves(50), context, {.batch_size = 10, .exactly_once = true});
  torch::manual_seed(7 + static_cast<uint64_t>(context.rank()));
  torch::nn::Sequential net(torch::nn::Linear(4, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  DistributedDataParallel model(net, context);
  const AdamWOptions adamw(0.01);
  std::unique_ptr<ZeroRedundancyOptimizer<AdamW>> optimizer;
  if (sharing == Sharing::kAlone)
    optimizer = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(net->parameters(), adamw);
  else
    optimizer = std::make_unique<ZeroRedundancyOptimizer<AdamW>>(
        model, adamw, ZeroRedundancyOptions{.shared_parameters = sharing == Sharing::kShared});
  Trainer trainer(net.ptr(), model, *optimizer, context, options);
  EXPECT_EQ(&trainer.model(), &model);
  Metrics metrics;
  Mean& error = metrics.add("error", Mean());
  trainer.evaluate_on(test, metrics, [&](Batch& batch) {
    error.update(torch::mse_loss(net->forward(batch.data), batch.target), batch.data.size(0));
  });
  const TrainerResult result =
      trainer.fit(data, [&](Batch& batch) { return torch::mse_loss(net->forward(batch.data), batch.target); });
  std::vector<at::Tensor> moments;
  for (const auto& item : state_dict(*optimizer)) moments.push_back(item.value().to(at::kDouble).flatten());
  const Result found{torch::nn::utils::parameters_to_vector(net->parameters()).detach().clone(), at::cat(moments),
                     result.best_score, result.epochs};
  context.group().barrier();
  return found;
}

void expect_same(const Result& one, const Result& other) {
  EXPECT_TRUE(one.weights.equal(other.weights));
  EXPECT_TRUE(one.moments.equal(other.moments));
  EXPECT_EQ(one.score, other.score);
  EXPECT_EQ(one.epochs, other.epochs);
}

class ShardedTrainer : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShardedTrainer, ::testing::Values(1, 2, 3),
                         [](const auto& instance) { return std::to_string(instance.param) + "_ranks"; });

TEST_P(ShardedTrainer, HasTheBitsOfEachRankAlone) {
  run_ranks(GetParam(), [](Context& context) {
    const TrainerOptions averaged{.epochs = 3, .ema = EmaOptions{.decays = {0.8}}};
    expect_same(train(context, Sharing::kCopies, averaged), train(context, Sharing::kAlone, averaged));
    for (const Precision precision : {Precision::kFloat, Precision::kBFloat16, Precision::kHalf}) {
      const TrainerOptions options{.epochs = 2, .precision = precision};  // half comes with a GradScaler
      const Result alone = train(context, Sharing::kAlone, options);
      expect_same(train(context, Sharing::kCopies, options), alone);
      expect_same(train(context, Sharing::kShared, options), alone);
    }
  });
}

TEST_P(ShardedTrainer, ResumesToTheSameBits) {
  const TemporaryFolder folder;
  run_ranks(GetParam(), [&](Context& context) {
    const auto schedule_of = [&](int epochs, const std::string& name) {
      return TrainerOptions{.epochs = epochs, .folder = (folder.path() / name).string()};
    };
    for (const Sharing sharing : {Sharing::kCopies, Sharing::kShared}) {
      const std::string name = sharing == Sharing::kShared ? "shared" : "copies";
      train(context, sharing, schedule_of(2, name));
      const Result resumed = train(context, sharing, schedule_of(4, name));
      train(context, Sharing::kAlone, schedule_of(2, name + "_alone"));
      expect_same(resumed, train(context, Sharing::kAlone, schedule_of(4, name + "_alone")));
      EXPECT_EQ(resumed.epochs, 4);
    }
  });
}

}  // namespace
}  // namespace lockstep::sharded_trainer_test
