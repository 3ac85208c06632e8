#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>

#include <lockstep/lockstep.h>

#include "checkpoint/failure.h"
#include "support/complaint.h"
#include "support/ranks.h"

// Loops written by hand whose loaders differ from rank to rank: an error on all ranks at the first reduction. Loops in
// which they may differ end well.

namespace lockstep::wrong_data_test {
namespace {

using namespace testing;  // NOLINT

struct Points : Dataset {
  explicit Points(int64_t count_) : count(count_) {}
  int64_t size() const override { return count; }
  Batch get(at::ArrayRef<int64_t> indices) const override {
    const at::Tensor chosen = at::tensor(indices, at::kLong).to(at::kFloat).unsqueeze(1);
    return {chosen, chosen * 2};
  }
  int64_t count;
};

/// From the last index to the first, or the other way.
struct Order : Sampler {
  Order(int64_t count_, bool turned_) : count(count_), turned(turned_) {}
  int64_t size() const override { return count; }
  std::vector<int64_t> order(int) override {
    std::vector<int64_t> all(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i) all[static_cast<size_t>(turned ? count - 1 - i : i)] = i;
    return all;
  }
  int64_t count;
  bool turned;
};

/// A model, and steps of it.
struct Trained {
  explicit Trained(Context& context_) : context(context_), model(net, context.group()) {}
  void step(const Batch& batch) {
    torch::mse_loss(net(batch.data / 100), batch.target).backward();
    if (!model.step_complete()) return;
    optimizer.step();
    optimizer.zero_grad();
  }
  void train(DataLoader& loader, int epochs = 2) {
    for (int epoch : loader.epochs(epochs)) {
      static_cast<void>(epoch);
      for (auto& batch : loader) step(batch);
    }
  }
  Context& context;
  torch::nn::Linear net{1, 1};
  DistributedDataParallel<torch::nn::Linear> model;
  torch::optim::SGD optimizer{net->parameters(), 1e-4};
};

class WrongData : public ::testing::TestWithParam<std::pair<Engine, int>> {
 protected:
  static void on_ranks(const std::function<void(Context&)>& body) {
    const auto& [engine, virtual_ranks] = GetParam();
    run_ranks(engine.world_size, body, std::chrono::seconds(30),
              {.seed = 3,
               .virtual_ranks = virtual_ranks,
               .collective_timeout = std::chrono::seconds(25),
               .backend = engine.backend,
               .announce = false});
  }
};
INSTANTIATE_TEST_SUITE_P(Engines, WrongData,
                         ::testing::Values(std::pair(Engine{2, "shm"}, 0), std::pair(Engine{3, "shm"}, 0),
                                           std::pair(Engine{2, "gloo"}, 0), std::pair(Engine{3, "gloo"}, 0),
                                           std::pair(Engine{2, "shm"}, 5), std::pair(Engine{3, "gloo"}, 5)),
                         [](const auto& one) {
                           return name_of(one.param.first) + "_" + std::to_string(one.param.second);
                         });

TEST_P(WrongData, OfLoadersThatDifferIsNamedOnAllRanks) {
  on_ranks([](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    const std::string last = std::to_string(context.world_size() - 1);
    const auto expect_named = [&](int64_t samples, const DataLoaderOptions& options, const std::string& fact) {
      Trained trained(context);
      DataLoader loader(Points(samples), context, options);
      const std::string text = failure([&] { trained.train(loader); });
      EXPECT_EQ(text.find("the loaders of the ranks would deal out different epochs"), 0u) << fact << ": " << text;
      EXPECT_NE(text.find("`" + fact), std::string::npos) << fact << ": " << text;
      EXPECT_NE(text.find("` on rank 0 and `"), std::string::npos) << text;
      EXPECT_NE(text.find("` on rank " + last), std::string::npos) << text;
    };
    const auto sampler = std::make_shared<Order>(60, odd);
    expect_named(odd ? 60 : 62, {.batch_size = 2}, "dataset_size 62");
    expect_named(60, {.batch_size = odd ? 2 : 3}, "batch_size 3");
    expect_named(60, {.batch_size = 2, .shuffle = odd}, "shuffle 0");
    expect_named(60, {.batch_size = 2, .shuffle = true, .seed = odd ? 1 : 2}, "seed 2");
    expect_named(62, {.batch_size = 2, .drop_last = odd}, "drop_last 0");
    expect_named(60, {.batch_size = 2, .sampler = sampler}, "order of the sampler");
  });
}

TEST_P(WrongData, ThatBeginsLaterOrElsewhereIsNamed) {
  on_ranks([](Context& context) {
    const bool odd = context.rank() == context.world_size() - 1;
    {
      Trained trained(context);
      DataLoader loader(Points(60), context, {.batch_size = 2, .shuffle = true});
      trained.train(loader, 1);
      loader.set_epoch(odd ? 4 : 1);  // a rank that counts by itself
      const std::string text = failure([&] {
        for (auto& batch : loader) trained.step(batch);
      });
      EXPECT_NE(text.find("`epoch 1` on rank 0 and `epoch 4`"), std::string::npos) << text;
    }
    if (context.virtual_ranks() > 0) return;  // there the Context says which virtual rank's turn it is
    Trained trained(context);
    DataLoader loader(Points(60), Shard(0, context.world_size()), {.batch_size = 2});
    const std::string text = failure([&] { trained.train(loader); });
    EXPECT_NE(text.find(" and rank 1 both read shard 0 of "), std::string::npos) << text;
  });
}

/// A look into the loader is a pass: the next one of this rank is of the next epoch.
TEST_P(WrongData, OfARankThatHasLookedIntoTheLoaderBesideTheLoopIsNamed) {
  if (GetParam().second > 0) GTEST_SKIP() << "the loops are those of one virtual rank each";
  on_ranks([](Context& context) {
    for (const bool is_first : {false, true}) {
      Trained trained(context);
      DataLoader loader(Points(60), context, {.batch_size = 2, .shuffle = true});
      if (context.rank() == (is_first ? 0 : context.world_size() - 1))
        for (auto& batch : loader) {
          static_cast<void>(batch);
          break;
        }
      const std::string text = failure([&] {
        for (auto& batch : loader) trained.step(batch);
      });
      EXPECT_NE(text.find("would deal out different epochs"), std::string::npos) << text;
      EXPECT_NE(text.find("`epoch 1` on rank "), std::string::npos) << text;
    }
  });
}

TEST_P(WrongData, OfRanksThatMayDifferIsTrainedOn) {
  if (GetParam().second > 0) GTEST_SKIP() << "the loops are those of one virtual rank each";
  on_ranks([](Context& context) {
    const int rank = context.rank(), ranks = context.world_size();
    Trained trained(context), other(context);
    DataLoader train(Points(60), context, {.batch_size = 2, .shuffle = true});
    DataLoader test(Points(30), context, {.batch_size = 2});
    // Training and validation in turn, the latter on one rank alone, and before the step that begins the next epoch.
    for (int epoch : train.epochs(3)) {
      for (auto& batch : train) trained.step(batch);
      if (rank == epoch % ranks)
        for (auto& batch : test) static_cast<void>(batch);
    }
    // Two loaders and two models in one loop.
    auto second = test.begin();
    for (auto& batch : train) {
      trained.step(batch);
      if (second != test.end()) other.step(*second), ++second;
    }
    // Data of one's own, of which each rank has as many batches.
    DataLoader own(Points(20 + rank % 2), Shard(0, 1),
                   {.batch_size = 2, .shuffle = true, .drop_last = true, .seed = 7 + rank});
    for (auto& batch : own) trained.step(batch);
    // Shards dealt out otherwise, and seeds that nothing depends on.
    DataLoader turned(Points(60), Shard((rank + 1) % ranks, ranks), {.batch_size = 2, .seed = rank});
    trained.train(turned);
    // Ranks that come to their next pass at different times.
    DataLoader uneven(Points(61), context, {.batch_size = 1 + rank, .exactly_once = true});
    trained.model.join([&] { trained.train(uneven, 3); });
    trained.model.check_divergence();
  });
}

TEST(WrongRows, AreNamed) {
  struct Short : Points {
    explicit Short(bool target_) : Points(20), target(target_) {}
    Batch get(at::ArrayRef<int64_t> indices) const override {
      Batch batch = Points::get(indices);
      at::Tensor& cut = target ? batch.target : batch.data;
      cut = cut.narrow(0, 0, cut.size(0) - 1);
      return batch;
    }
    bool target;
  };
  for (const bool target : {false, true}) {
    DataLoader loader(Short(target), Shard(0, 1), {.batch_size = 4});
    const std::string text = complaint([&] {
      for (auto& batch : loader) static_cast<void>(batch);
    });
    EXPECT_NE(text.find("was asked for 4 samples, but the `" + std::string(target ? "target" : "data") +
                        "` that it returned has the shape [3, 1]"),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace lockstep::wrong_data_test
