// Fully sharded training of parameters of 16 bits with masters in float, on machines that LOCKSTEP_MACHINE makes,
// against DistributedDataParallel with the sharded optimizer on as many ranks of one machine, and against float.

#include <filesystem>
#include <fstream>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/sharded_initialization.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/deep.h"
#include "fully_sharded/small_gpt.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::sixteen_bits_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;
using Replicated = DistributedDataParallel<SmallGpt>;
using Sharded = FullyShardedDataParallel<SmallGpt>;

constexpr int kLayers = 4, kSaved = 3, kEnd = 7;

struct Training {
  at::ScalarType dtype = at::kBFloat16;
  ZeroRedundancyOptions optimizer = {.master_weights = true};
  std::string checkpoints = {};
  int end = kEnd;
  bool save = true;
};

/// Trains from the newest checkpoint, if there is one, and saves step kSaved. Returns norms, losses, and the hash of
/// the weights, on rank 0.
template <typename Model, typename Options>
std::string trained(const Context& context, const Options& options, const Training& what, auto&&... sharded) {
  SmallGpt net(kLayers);
  net->to(what.dtype);
  Model model(net, context, sharded...);
  ZeroRedundancyOptimizer optimizer(model, decay_groups(*net, options), options, what.optimizer);
  std::optional<Checkpointer> checkpointer;
  if (!what.checkpoints.empty()) {
    checkpointer.emplace(what.checkpoints, context.group());
    checkpointer->add("model", model).add("optimizer", optimizer);
    checkpointer->resume();
  }
  std::ostringstream text;
  text << std::hexfloat;
  for (auto step = checkpointer ? static_cast<int>(checkpointer->resumed_step()) : 0; step < what.end; ++step) {
    optimizer.zero_grad();
    const at::Tensor data = text_of(step, context.rank());
    loss_of(model(data, step).to(at::kFloat), data).backward();
    const double norm = model.clip_grad_norm(0.3);
    if (step >= kSaved) text << norm << ' ';
    optimizer.step();
    if (checkpointer && what.save && step + 1 == kSaved) checkpointer->save(kSaved);
  }
  if (checkpointer) checkpointer->finish();
  if constexpr (std::derived_from<Model, FullySharded>) {
    const StateDict end = model.state_dict();
    return context.rank() == 0 ? text.str() + hash(end) : "";
  } else {
    return text.str() + hash(state_dict(*net));
  }
}

/// Rank 0's result, as another process has it.
std::string result_of(const Engine& engine, const std::function<std::string(Context&)>& body) {
  const TemporaryFolder results;
  const std::string path = results.path() / "result";
  run_alike(engine, [&](Context& context) {
    const std::string result = body(context);
    if (context.rank() == 0) std::ofstream(path) << result;
  });
  std::string result;
  std::getline(std::ifstream(path), result);
  EXPECT_FALSE(result.empty());
  return result;
}

template <typename Model, typename Options>
std::string run(const Engine& engine, const Options& options, const Training& what) {
  return result_of(engine, [&](Context& context) { return trained<Model>(context, options, what); });
}

Engine replicated(const Engine& engine) { return {engine.world_size, engine.world_size == 1 ? "" : "shm"}; }

class SixteenBitsOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""},
                           {2, "shm"},
                           {3, "shm"},
                           {2, "gloo"},
                           {2, "hierarchical", "ab"},
                           {3, "hierarchical", "abc"},
                           {4, "hierarchical", "aabb"},
                           {4, "hierarchical", "abcd"},
                           {6, "hierarchical", "aabbcc"}};
INSTANTIATE_TEST_SUITE_P(Machines, SixteenBitsOn, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(SixteenBitsOn, HaveTheBitsOfTheShardedOptimizer) {
  const Engine& engine = GetParam();
  const auto compare = [&](const auto& options, const Training& what, const FullyShardedOptions& sharded = {}) {
    const std::string actual =
        result_of(engine, [&](Context& context) { return trained<Sharded>(context, options, what, sharded); });
    EXPECT_EQ(actual, run<Replicated>(replicated(engine), options, what)) << what.dtype;
  };
  compare(AdamWOptions(0.01).weight_decay(0.1), {});
  compare(AdamWOptions(0.01).amsgrad(true), {.dtype = at::kHalf}, {.keep_gathered = true});
  compare(SGDOptions(0.1), {});  // its only state is the master
  compare(SGDOptions(0.1).momentum(0.9), {.optimizer = {}}, {.prefetch = 0});
}

TEST(SixteenBits, MastersKeepWhatThePartsHaveNoRoomFor) {
  for (const bool masters : {true, false})
    run_alike({2, "hierarchical", "ab"}, [&](Context& context) {
      torch::nn::Sequential net(ShardedUnit<torch::nn::Linear>(torch::nn::LinearOptions(64, 64).bias(false)));
      torch::nn::init::ones_(net->parameters().front());
      net->to(at::kBFloat16);
      FullyShardedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, SGDOptions(1e-4), {.master_weights = masters});
      for (int step = 0; step < 200; ++step) {
        optimizer.zero_grad();
        model(at::ones({1, 64}, at::kBFloat16)).sum().backward();
        optimizer.step();
      }
      const StateDict state = model.state_dict();
      if (context.rank() != 0) return;
      // 200 steps of 1e-4; each alone is less than half of bfloat16's last bit below 1.
      EXPECT_NEAR(state["0.weight"].min().item<double>(), masters ? 0.98 : 1, 0.003);
      EXPECT_EQ(state["0.weight"].scalar_type(), at::kBFloat16);
    });
}

TEST(SixteenBits, LearnAlmostAsFloatDoes) {
  run_alike({2, "hierarchical", "ab"}, [&](Context& context) {
    const auto losses = [&](at::ScalarType dtype) {
      SmallGpt net(kLayers);
      net->to(dtype);
      Sharded model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(0.01), {.master_weights = true});
      std::vector<double> all;
      for (int step = 0; step < 30; ++step) {
        optimizer.zero_grad();
        const at::Tensor data = text_of(step, context.rank());
        const at::Tensor loss = loss_of(model(data).to(at::kFloat), data);
        loss.backward();
        optimizer.step();
        all.push_back(loss.item<double>());
      }
      return all;
    };
    const std::vector<double> exact = losses(at::kFloat), rounded = losses(at::kBFloat16);
    EXPECT_LT(exact.back(), exact.front() / 2);
    for (size_t step = 0; step < exact.size(); ++step)
      EXPECT_NEAR(rounded[step], exact[step], 0.03 * exact.front()) << "step " << step;
    EXPECT_NE(rounded, exact);
  });
}

TEST(SixteenBits, GoOnOnOtherMachinesBitForBit) {
  const auto goes_on = [](const auto& options, const Training& what) {
    const Engine four[] = {{4, "shm"}, {4, "hierarchical", "aabb"}, {4, "hierarchical", "abcd"}};
    const TemporaryFolder undisturbed;
    Training whole = what;
    whole.checkpoints = undisturbed.path();
    const std::string expected = run<Replicated>(four[0], options, whole);
    for (size_t i = 0; i < std::size(four); ++i) {
      const Engine &saves = four[i], &resumes = four[(i + 1) % std::size(four)];
      SCOPED_TRACE(name_of(saves) + " to " + name_of(resumes));
      const TemporaryFolder folder;
      Training part = what;
      part.checkpoints = folder.path();
      part.end = kSaved;
      run<Sharded>(saves, options, part);
      part.end = kEnd;
      part.save = false;
      EXPECT_EQ(run<Sharded>(resumes, options, part), expected);
      EXPECT_EQ(run<Replicated>(four[0], options, part), expected) << "of a file of sharded training";
      // The newest file: parameters in 16 bits, and masters and state in float.
      for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        if (entry.path().extension() != ".pt") continue;
        const StateDict saved = load(entry.path().string()).tensors;
        EXPECT_EQ(saved["model.layers.1.in.weight"].scalar_type(), what.dtype);
        EXPECT_EQ(saved["optimizer.state.0.master_param"].scalar_type(), at::kFloat);
        EXPECT_TRUE(at::equal(saved["optimizer.state.0.master_param"].to(what.dtype), saved["model.tokens.weight"]));
        EXPECT_FALSE(at::equal(saved["optimizer.state.0.master_param"],
                               saved["optimizer.state.0.master_param"].to(what.dtype).to(at::kFloat)))
            << "nothing to keep";
      }
    }
  };
  goes_on(AdamWOptions(0.01).weight_decay(0.1), {});
  goes_on(SGDOptions(0.1), {.dtype = at::kHalf});
}

TEST(SixteenBits, MastersLieInTheStateFolderToo) {
  const std::string here = std::filesystem::current_path();  // on the disk of the build
  for (const Engine& engine : {Engine{1, ""}, Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}}) {
    SCOPED_TRACE(name_of(engine));
    for (const bool momentum : {false, true}) {
      const SGDOptions options = SGDOptions(0.1).momentum(momentum ? 0.9 : 0);
      const TemporaryFolder folder;
      const Training files{.optimizer = {.master_weights = true, .state_folder = here}};
      const std::string expected = run<Sharded>(engine, options, {});
      EXPECT_EQ(run<Sharded>(engine, options, files), expected);
      Training part = files;
      part.checkpoints = folder.path();
      part.end = kSaved;
      run<Sharded>(engine, options, part);
      part.end = kEnd;
      EXPECT_EQ(run<Sharded>(engine, options, part), expected);
    }
  }
}

/// What a step sends and holds, in bytes.
FullyShardedStats figures_of(const Context& context, at::ScalarType dtype) {
  Deep net;
  net->to(dtype);
  FullyShardedDataParallel model(net, context);
  ZeroRedundancyOptimizer optimizer(model, AdamWOptions(0.001), {.master_weights = true});
  FullyShardedStats before;
  for (int step = 0; step < 2; ++step) {
    before = model.stats();
    optimizer.zero_grad();
    model(at::ones({2, 1024}, dtype)).sum().backward();
    optimizer.step();
  }
  FullyShardedStats stats = model.stats();
  stats.sent_bytes -= before.sent_bytes;
  return stats;
}

TEST(SixteenBits, HalveWhatIsGatheredAndSent) {
  for (const Engine& engine : {Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}})
    run_alike(engine, [&](Context& context) {
      const FullyShardedStats wide = figures_of(context, at::kFloat), narrow = figures_of(context, at::kBFloat16);
      EXPECT_EQ(2 * narrow.parameter_bytes, wide.parameter_bytes);
      EXPECT_EQ(2 * narrow.part_bytes, wide.part_bytes);
      EXPECT_EQ(2 * narrow.gathered_bytes, wide.gathered_bytes);
      // If ranks of a machine and machines add, gradients go in float: one of three transfers, two of which gather, but
      // for two units.
      const auto slice = wide.part_bytes / DeepImpl::kUnits;
      EXPECT_EQ(wide.sent_bytes, slice * (3 * DeepImpl::kUnits - 2));
      EXPECT_EQ(narrow.sent_bytes, context.world_size() == 2
                                       ? wide.sent_bytes / 2
                                       : slice * (2 * DeepImpl::kUnits - 2) / 2 + slice * DeepImpl::kUnits);
    });
}

/// A layer that is made in 16 bits.
struct NarrowImpl : WideImpl {
  NarrowImpl() { to(at::kBFloat16); }
};
TORCH_MODULE(Narrow);

TEST(SixteenBits, AreMadePartByPart) {
  run_alike({4, "hierarchical", "aabb"}, [](Context& context) {
    const auto made = [&](bool part_by_part) {
      torch::manual_seed(5);
      std::optional<ShardedInitialization> initialization;
      if (part_by_part) initialization.emplace(context);
      torch::nn::Sequential net;
      for (int i = 0; i < 2; ++i) net->push_back(ShardedUnit<Narrow>());
      initialization.reset();
      FullyShardedDataParallel model(net, context);
      EXPECT_EQ(model.stats().parameter_bytes, 2 * kUnitKib * 1024 / 2);
      return model.hash();
    };
    EXPECT_EQ(made(true), made(false));
  });
}

}  // namespace
}  // namespace lockstep::sixteen_bits_test
