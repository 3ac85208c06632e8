#include <gtest/gtest.h>

#include <torch/torch.h>

#include <lockstep/lockstep.h>

#include "checkpoint/failure.h"
#include "support/complaint.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Trainings that rest on a mistake: each is an error on all ranks.

namespace lockstep {
namespace {

using testing::complaint;
using testing::failure;
using testing::run_ranks;

/// Points and their sums.
class SummedPoints : public Dataset {
 public:
  explicit SummedPoints(int64_t count) : data_(at::arange(count * 4, at::kFloat).view({count, 4}).sin()) {}
  int64_t size() const override { return data_.size(0); }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor chosen = data_.index_select(0, at::tensor(indices, at::kLong));
    return {chosen, chosen.sum(1, true)};
  }

 private:
  const at::Tensor data_;
};

class WrongTrainings : public ::testing::TestWithParam<testing::Engine> {
 protected:
  void on_ranks(const std::function<void(Context&)>& body) const { run_ranks(GetParam(), body); }
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongTrainings,
                         ::testing::Values(testing::Engine{2, "shm"}, testing::Engine{3, "shm"},
                                           testing::Engine{2, "gloo"}, testing::Engine{3, "gloo"}),
                         [](const auto& instance) { return testing::name_of(instance.param); });

/// In an order of its own, or from another seed or dataset.
struct Turned : Sampler {
  Turned(int64_t count, bool turned) : count_(count), turned_(turned) {}
  int64_t size() const override { return count_; }
  std::vector<int64_t> order(int epoch) override {
    std::vector<int64_t> all(static_cast<size_t>(count_));
    for (int64_t i = 0; i < count_; ++i) all[static_cast<size_t>(turned_ && epoch > 0 ? count_ - 1 - i : i)] = i;
    return all;
  }

 private:
  const int64_t count_;
  const bool turned_;
};

TEST_P(WrongTrainings, LoadersThatDifferAreNamedOnAllRanks) {
  on_ranks([](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    const auto refused = [&](int64_t samples, DataLoaderOptions options, bool evaluates) {
      torch::nn::Linear net(4, 1);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      DataLoader loader(SummedPoints(samples), context, std::move(options));
      Metrics metrics;
      metrics.add("error", Mean());
      if (evaluates)
        return failure(
            [&] { evaluate(*net, loader, context.group(), metrics, [&](Batch& batch) { net(batch.data); }); });
      Trainer trainer(net.ptr(), optimizer, context, {.epochs = 2, .progress = false});
      return failure(
          [&] { trainer.fit(loader, [&](Batch& batch) { return torch::mse_loss(net(batch.data), batch.target); }); });
    };
    const std::string rank = " on rank " + std::to_string(context.world_size() - 1) + " differs from that on rank";
    const auto expect_named = [&](int64_t samples, const DataLoaderOptions& options, const std::string& part) {
      for (const bool evaluates : {false, true}) {
        DataLoaderOptions mine = options;
        mine.exactly_once = evaluates;
        const std::string text = refused(samples, mine, evaluates);
        EXPECT_NE(text.find("would deal out different epochs"), std::string::npos) << part << text;
        EXPECT_NE(text.find(part + rank), std::string::npos) << part << text;
      }
    };
    expect_named(odd ? 24 : 26, {.batch_size = 2}, "dataset_size");
    expect_named(24, {.batch_size = odd ? 2 : 3}, "batch_size");
    expect_named(24, {.batch_size = 6, .split_batches = odd}, "split_batches");
    expect_named(24, {.batch_size = 2, .accumulate = odd ? 1 : 2}, "accumulate");
    expect_named(24, {.batch_size = 2, .shuffle = odd}, "shuffle");
    expect_named(24, {.batch_size = 2, .shuffle = true, .seed = odd ? 1 : 2}, "seed");
    const std::string text = refused(24, {.batch_size = 2, .sampler = std::make_shared<Turned>(24, odd)}, false);
    EXPECT_NE(text.find("order" + rank), std::string::npos) << text;
    EXPECT_EQ(refused(24, {.batch_size = 2, .sampler = std::make_shared<Turned>(24, true)}, false), "");
  });
}

TEST_P(WrongTrainings, AnEvaluationComparesTheOrderOfASampler) {
  on_ranks([](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    DataLoader loader(SummedPoints(24), context,
                      {.batch_size = 2, .sampler = std::make_shared<Turned>(24, odd), .exactly_once = true});
    Metrics metrics;
    metrics.add("error", Mean());
    const auto evaluated = [&] { return failure([&] { evaluate(loader, context.group(), metrics, [](Batch&) {}); }); };
    EXPECT_EQ(evaluated(), "") << "the first epoch has one order";
    const std::string text = evaluated();
    EXPECT_NE(text.find("order on rank " + std::to_string(context.world_size() - 1)), std::string::npos) << text;
  });
}

TEST_P(WrongTrainings, ALoaderOfAnotherRankIsNamed) {
  on_ranks([](Context& context) {
    torch::nn::Linear net(4, 1);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    DataLoader loader(SummedPoints(24), Shard(0, context.world_size()), {.batch_size = 2});
    Trainer trainer(net.ptr(), optimizer, context, {.epochs = 2, .progress = false});
    const std::string text = failure(
        [&] { trainer.fit(loader, [&](Batch& batch) { return torch::mse_loss(net(batch.data), batch.target); }); });
    EXPECT_NE(text.find("the loader of rank 1 cannot be used: it is rank 0 of "), std::string::npos) << text;
  });
}

/// Where ranks work for several virtual ranks, the comparison must not look into a step.
TEST_P(WrongTrainings, LoadersOfVirtualRanksAreComparedToo) {
  const auto body = [](Context& context) {
    const auto refused = [&](int64_t samples, const std::shared_ptr<Sampler>& sampler = nullptr) {
      torch::nn::Linear net(4, 1);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      DataLoader loader(SummedPoints(samples), context,
                        {.batch_size = 2, .shuffle = sampler == nullptr, .sampler = sampler});
      DataLoader test(SummedPoints(samples), context, {.batch_size = 2, .exactly_once = true});
      Metrics metrics;
      auto& error = metrics.add("error", Mean());
      Trainer trainer(net.ptr(), optimizer, context, {.epochs = 2, .progress = false});
      trainer.evaluate_on(test, metrics,
                          [&](Batch& batch) { error.update(torch::mse_loss(net(batch.data), batch.target)); });
      return failure(
          [&] { trainer.fit(loader, [&](Batch& batch) { return torch::mse_loss(net(batch.data), batch.target); }); });
    };
    EXPECT_EQ(refused(40), "");
    const std::string text = refused(context.rank() == 0 ? 40 : 50);
    EXPECT_NE(text.find("dataset_size on rank"), std::string::npos) << text;
    const std::string order = refused(40, std::make_shared<Turned>(40, context.rank() == 0));
    EXPECT_NE(order.find("order on rank"), std::string::npos) << order;
  };
  run_ranks(GetParam().world_size, body, std::chrono::seconds(60),
            {.seed = 3, .virtual_ranks = 5, .backend = GetParam().backend, .announce = false});
}

TEST_P(WrongTrainings, ALossThatIsNoNumberIsNamed) {
  on_ranks([](Context& context) {
    DataLoader train(SummedPoints(24), context, {.batch_size = 4});
    const auto refused = [&](const std::function<at::Tensor(const at::Tensor& outputs)>& loss) {
      torch::nn::Linear net(4, 1);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      Trainer trainer(net.ptr(), optimizer, context, {.progress = false});
      return complaint([&] { trainer.fit(train, [&](Batch& batch) { return loss(net(batch.data)); }); });
    };
    EXPECT_NE(refused([](const at::Tensor&) { return at::Tensor(); }).find("an undefined tensor"), std::string::npos);
    EXPECT_NE(refused([](const at::Tensor& outputs) { return outputs; }).find("shape [4, 1]; return one number"),
              std::string::npos);
    EXPECT_NE(refused([](const at::Tensor& outputs) { return outputs.detach().sum(); }).find("on no parameter"),
              std::string::npos);
    EXPECT_EQ(refused([](const at::Tensor& outputs) { return outputs.mean().view({1}); }), "") << "one number";
  });
}

TEST_P(WrongTrainings, AModelOfAnotherModuleIsRefused) {
  on_ranks([](Context& context) {
    const torch::nn::Sequential trained(torch::nn::Linear(4, 8), torch::nn::Linear(8, 1));
    const torch::nn::Sequential other(torch::nn::Linear(4, 8), torch::nn::Linear(8, 1));
    torch::optim::SGD optimizer(trained->parameters(), 0.1);
    const auto refused = [&](Replica& model) {
      return failure([&] { const Trainer trainer(trained.ptr(), model, optimizer, context, {.progress = false}); });
    };
    const std::string named = "the optimizer trains the parameter 0.weight of the module, but the given model is";
    {
      DistributedDataParallel model(other, context);
      EXPECT_NE(refused(model).find(named), std::string::npos) << "of another module";
    }
    {
      Replica model(NamedTensors{{"weight", trained->parameters()[2]}, {"bias", trained->parameters()[3]}},
                    context.group());
      EXPECT_NE(refused(model).find(named), std::string::npos) << "of a part of the parameters";
      trained->parameters()[0].requires_grad_(false);
      trained->parameters()[1].requires_grad_(false);
      EXPECT_EQ(refused(model), "") << "the others are frozen";
      trained->parameters()[0].requires_grad_(true);
      trained->parameters()[1].requires_grad_(true);
    }
    {
      const bool odd = context.rank() == context.world_size() - 1;
      DistributedDataParallel model(odd ? other : trained, context);
      const std::string text = refused(model);
      EXPECT_NE(text.find("(on rank " + std::to_string(context.world_size() - 1) + ")"), std::string::npos) << text;
    }
    DistributedDataParallel model(trained, context, {.parameters_to_ignore = {"0.weight"}});
    EXPECT_EQ(refused(model), "") << "ignored on purpose";
  });
}

TEST(WrongTrainingsOfMachines, AModelOfOneMachineAloneIsRefused) {
  for (const testing::Engine& engine : {testing::Engine{2, "gloo", "ab"}, testing::Engine{4, "hierarchical", "aabb"}}) {
    SCOPED_TRACE(testing::name_of(engine));
    run_ranks(engine, [](Context& context) {
      torch::nn::Linear net(4, 1);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      DistributedDataParallel model(net, context.group().on_this_machine());
      const auto refused = [&](const TrainerOptions& options) {
        return failure([&] { const Trainer trainer(net.ptr(), model, optimizer, context, options); });
      };
      const std::string text = refused({.progress = false});
      EXPECT_NE(text.find("but the context has " + std::to_string(context.world_size())), std::string::npos) << text;
      EXPECT_NE(text.find("TrainerOptions::diloco"), std::string::npos) << text;
      EXPECT_EQ(refused({.diloco = DiLoCoOptions{}, .progress = false}), "");
    });
  }
}

TEST(RunLogMisuse, StepsAndSamplesBelowZeroAreRefused) {
  const TemporaryFolder folder;
  run_ranks(2, [&](Context& context) {
    const std::string path = (folder.path() / "log").string();
    const std::string text = complaint([&] { RunLog(context, {.folder = path, .first_step = -1}); });
    EXPECT_NE(text.find("first_step is -1"), std::string::npos) << text;
    RunLog log(context, {.folder = path});
    EXPECT_NE(complaint([&] { log.step(-1); }).find("-1 samples"), std::string::npos);
    EXPECT_NE(complaint([&] { log.epoch(-2); }).find("-2"), std::string::npos);
    EXPECT_NE(complaint([&] { log.scalar("loss", 1, -3); }).find("`loss` at step -3"), std::string::npos);
    log.step(1, {{"loss", 1}});
    log.scalar("loss", 1, 0);
  });
}

}  // namespace
}  // namespace lockstep
