// Checkpoints of fully sharded training: written piece by piece, resumed on other machines and numbers of ranks, and by
// programs that are not sharded.

#include <lockstep/checkpointer.h>

#include <atomic>
#include <fstream>
#include <functional>
#include <thread>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/deep.h"
#include "fully_sharded/small_gpt.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::sharded_checkpoint_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int kLayers = 4, kSaved = 3, kEnd = 6;

/// Trains from the newest checkpoint of the folder to step `end`, and saves there. Returns the hash of the weights on
/// rank 0.
template <typename Model, typename Options>
std::string trained(Context& context, const std::string& folder, const Options& options, int end, bool save = true) {
  SmallGpt net(kLayers);
  Model model(net, context);
  ZeroRedundancyOptimizer optimizer(model, decay_groups(*net, options), options);
  Checkpointer checkpointer(folder, context.group());
  checkpointer.add("model", model).add("optimizer", optimizer);
  checkpointer.resume();
  for (auto step = static_cast<int>(checkpointer.resumed_step()); step < end; ++step) {
    optimizer.zero_grad();
    const at::Tensor data = text_of(step, context.rank());
    loss_of(model(data, step), data).backward();
    optimizer.step();
    if (step + 1 == kSaved && save) checkpointer.save(kSaved);
  }
  if (end == kEnd && save) checkpointer.save(kEnd);
  checkpointer.finish();
  if constexpr (std::derived_from<Model, FullySharded>) {
    const StateDict state = model.state_dict();
    return context.rank() == 0 ? hash(state) : "";
  } else {
    return hash(state_dict(*net));
  }
}

using Replicated = DistributedDataParallel<SmallGpt>;
using Sharded = FullyShardedDataParallel<SmallGpt>;

/// Rank 0's result, as another process has it.
template <typename Model, typename Options>
std::string run(const Engine& engine, const std::string& folder, const Options& options, int end, bool save = true) {
  const TemporaryFolder results;
  const std::string path = results.path() / "hash";
  run_alike(engine, [&](Context& context) {
    const std::string hash = trained<Model>(context, folder, options, end, save);
    if (context.rank() == 0) std::ofstream(path) << hash;
  });
  std::string hash;
  std::getline(std::ifstream(path), hash);
  EXPECT_FALSE(hash.empty());
  return hash;
}

TEST(ShardedCheckpoint, OfOneRank) {
  const AdamWOptions options(0.01);
  const TemporaryFolder undisturbed, folder;
  const std::string expected = run<Replicated>({1, ""}, undisturbed.path(), options, kEnd);
  run<Sharded>({1, ""}, folder.path(), options, kSaved);
  EXPECT_EQ(run<Sharded>({1, ""}, folder.path(), options, kEnd), expected);
}

const Engine kFour[] = {{4, "shm"}, {4, "hierarchical", "aabb"}, {4, "hierarchical", "abcd"}, {4, "gloo"}};

template <typename Options>
void goes_on(const Options& options) {
  const TemporaryFolder undisturbed;
  const std::string expected = run<Replicated>({4, "shm"}, undisturbed.path(), options, kEnd);
  for (size_t i = 0; i < std::size(kFour); ++i) {
    const Engine &saves = kFour[i], &resumes = kFour[(i + 1) % std::size(kFour)];
    SCOPED_TRACE(name_of(saves) + " to " + name_of(resumes));
    const TemporaryFolder folder;
    run<Sharded>(saves, folder.path(), options, kSaved);
    EXPECT_EQ(run<Sharded>(resumes, folder.path(), options, kEnd, /*save=*/false), expected);
    EXPECT_EQ(run<Replicated>({4, "shm"}, folder.path(), options, kEnd), expected) << "of a file of sharded training";
  }
}

TEST(ShardedCheckpoint, GoesOnOnOtherMachinesBitForBit) { goes_on(AdamWOptions(0.01).weight_decay(0.1)); }
TEST(ShardedCheckpoint, GoesOnWithMomentum) { goes_on(SGDOptions(0.1).momentum(0.9)); }

TEST(ShardedCheckpoint, GoesOnOnOtherNumbersOfRanksAsReplicasDo) {
  const AdamWOptions options(0.01);
  const TemporaryFolder folder;
  run<Sharded>({4, "hierarchical", "aabb"}, folder.path(), options, kSaved);
  for (const Engine& engine : {Engine{1, ""}, Engine{2, "shm"}, Engine{2, "hierarchical", "ab"},
                               Engine{3, "hierarchical", "abc"}, Engine{3, "gloo"}}) {
    SCOPED_TRACE(name_of(engine));
    const Engine alike{engine.world_size, engine.world_size == 1 ? "" : "shm"};
    EXPECT_EQ(run<Sharded>(engine, folder.path(), options, kEnd, /*save=*/false),
              run<Replicated>(alike, folder.path(), options, kEnd, /*save=*/false));
  }
}

TEST(ShardedCheckpoint, IsSavedAgainAfterItWasResumed) {
  const AdamWOptions options(0.01);
  const TemporaryFolder once, twice;
  const Engine engine{4, "hierarchical", "aabb"};
  run<Sharded>(engine, once.path(), options, kEnd);
  run<Sharded>(engine, twice.path(), options, kSaved);
  run<Sharded>(engine, twice.path(), options, kEnd);
  const auto newest = [](const TemporaryFolder& folder) {
    std::string path;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      if (entry.path().extension() == ".pt") path = std::max(path, entry.path().string());
    return load(path).tensors;
  };
  const StateDict expected = newest(once), actual = newest(twice);
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& item : expected)
    if (item.key().starts_with("model") || item.key().starts_with("optimizer")) {
      EXPECT_TRUE(at::equal(actual[item.key()], item.value())) << item.key();
    }
  EXPECT_EQ(expected["model.layers.1.in.weight"].sizes(), (std::vector<int64_t>{72, 24}));
}

TEST(ShardedCheckpoint, NoRankHoldsTheWholeOfIt) {
  const TemporaryFolder folder;
  run_alike({4, "hierarchical", "aabb"}, [&](Context& context) {
    Deep net;
    FullyShardedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-3));
    Checkpointer checkpointer(folder.path(), context.group());
    checkpointer.add("model", model).add("optimizer", optimizer);
    const auto step = [&] {
      optimizer.zero_grad();
      model(at::ones({1, 1024})).sum().backward();
      optimizer.step();
    };
    step();
    const auto most_while = [&](const std::function<void()>& body) {
      std::atomic<bool> done{false};
      int64_t most = 0;
      std::thread watcher([&] {
        while (!done)
          most = std::max(most, proportional_kib()), std::this_thread::sleep_for(std::chrono::milliseconds(1));
      });
      const int64_t before = proportional_kib();
      body();
      done = true;
      watcher.join();
      return most - before;
    };
    // Three arrays of each parameter; a rank's parts are a quarter, of which state moves once.
    EXPECT_LT(most_while([&] { checkpointer.save(1); }), kModelKib);
    step();
    EXPECT_LT(most_while([&] { checkpointer.save(2); }), kModelKib / 2);
    EXPECT_LT(most_while([&] { checkpointer.resume(); }), kModelKib);
    step();
    checkpointer.finish();
  });
}

/// What LibTorch's and the library's own errors say.
std::string told_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

TEST(ShardedCheckpoint, TheModuleInPlaceOfTheModelIsRefused) {
  for (const Engine& engine : {Engine{1, ""}, Engine{2, "shm"}, Engine{2, "hierarchical", "ab"}}) {
    SCOPED_TRACE(name_of(engine));
    const TemporaryFolder folder;
    run_alike(engine, [&](Context& context) {
      using enum Checkpointer::Scope;
      SmallGpt net(kLayers);
      Checkpointer early((folder.path() / "early").string(), context.group());
      early.add("model", *net);  // the model that trains it is not there yet
      Sharded model(net, context);
      Checkpointer checkpointer((folder.path() / "run").string(), context.group());
      for (const auto scope : {kAllRanks, kEachRank, kRankZero}) {
        const std::string text = told_by([&] { checkpointer.add("model", *net, scope); });
        EXPECT_NE(text.find("the module of part `model` is trained by a FullyShardedDataParallel"), std::string::npos)
            << text;
      }
      const std::string text = told_by([&] { early.save(1); });
      EXPECT_NE(text.find("add that instead: checkpointer.add(\"model\", model)"), std::string::npos) << text;
    });
  }
}

TEST(ShardedCheckpoint, ACheckpointerOfAnotherGroupIsNamed) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}}) {
    SCOPED_TRACE(name_of(engine));
    const TemporaryFolder folder;
    run_alike(engine, [&](Context& context) {
      const Group here = context.group().on_this_machine();
      SmallGpt net(kLayers);
      Sharded model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(0.01));
      Checkpointer checkpointer(folder.path() / std::to_string(context.rank() - here.rank()), here);
      checkpointer.add("model", model).add("optimizer", optimizer);
      const std::string text = told_by([&] { checkpointer.save(1); });
      EXPECT_NE(text.find("a state lies in slices on " + std::to_string(context.world_size()) + " ranks"),
                std::string::npos)
          << text;
      EXPECT_NE(text.find("make it with the group that the model was made with"), std::string::npos) << text;
    });
  }
}

TEST(ShardedCheckpoint, IsRefusedWhereItWouldBeWhole) {
  const TemporaryFolder folder;
  run_alike({2, "hierarchical", "ab"}, [&](Context& context) {
    SmallGpt net(kLayers);
    FullyShardedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-3));
    const auto said = [](const std::function<void()>& body) {
      try {
        body();
      } catch (const std::exception& error) {
        return std::string(error.what());
      }
      return std::string("nothing");
    };
    EXPECT_NE(said([&] { (void)optimizer_state_dict(optimizer); }).find("save it with a Checkpointer"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep::sharded_checkpoint_test
