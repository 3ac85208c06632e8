// A pipeline computes what one process does: losses, gradients, weights; on every engine, with several pipelines beside
// each other, and through a checkpoint.

#include <lockstep/pipeline.h>

#include <cmath>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/zero_redundancy_optimizer.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/loss.h>
#include <torch/nn/utils/clip_grad.h>

#include "pipeline/small_sequence.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::pipeline_test {
namespace {

using namespace testing;  // NOLINT

constexpr int kSteps = 5;
constexpr int64_t kRows = 13;  // which four micro-batches cannot share equally

struct Case {
  Engine engine;
  PipelineOptions options;
};
void PrintTo(const Case& one, std::ostream* out) { *out << name_of(one.engine) << " in " << one.options.stages; }

class PipelineOn : public ::testing::TestWithParam<Case> {
 protected:
  void on_ranks(const std::function<void(Context&)>& body) const { run_ranks(GetParam().engine, body); }
};

const Case kCases[] = {
    {{1, ""}, {.stages = 1, .micro_batches = 4}},
    {{2, "shm"}, {.stages = 2, .micro_batches = 4}},
    {{3, "shm"}, {.stages = 3, .micro_batches = 4}},
    {{3, "gloo"}, {.stages = 3, .micro_batches = 2}},
    {{2, "gloo"}, {.stages = 2, .micro_batches = 4, .cuts = {1}}},
    {{4, "shm"}, {.stages = 2, .micro_batches = 4}},
    {{4, "shm"}, {.stages = 4, .micro_batches = 8, .cuts = {1, 3, 5}}},
    {{4, "hierarchical", "aabb"}, {.stages = 2, .micro_batches = 4}},
    {{4, "hierarchical", "abcd"}, {.stages = 4, .micro_batches = 8, .cuts = {1, 3, 5}}},
};
INSTANTIATE_TEST_SUITE_P(Engines, PipelineOn, ::testing::ValuesIn(kCases), [](const auto& instance) {
  return name_of(instance.param.engine) + "_in_" + std::to_string(instance.param.options.stages);
});

/// Of one process that takes the mean over the batches of all pipelines.
struct Alone {
  explicit Alone(uint64_t seed) {
    torch::manual_seed(seed);
    layers = small_sequence();
    optimizer = std::make_unique<torch::optim::SGD>(layers->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  }
  struct Step {
    std::vector<double> losses;  ///< of the pipelines
    double norm;
  };
  Step step(int number, int pipelines) {
    Step result;
    optimizer->zero_grad();
    for (int pipeline = 0; pipeline < pipelines; ++pipeline) {
      const auto [data, target] = small_batch(number, pipeline, kRows);
      const at::Tensor loss = small_loss(layers->forward(data), target);
      result.losses.push_back(loss.item<double>());
      (loss / pipelines).backward();
    }
    result.norm = torch::nn::utils::clip_grad_norm_(layers->parameters(), 0.2);
    optimizer->step();
    return result;
  }
  torch::nn::Sequential layers{nullptr};
  std::unique_ptr<torch::optim::SGD> optimizer;
};

void expect_near(const StateDict& state, const torch::nn::Module& expected) {
  const StateDict all = state_dict(expected);
  ASSERT_EQ(state.keys(), all.keys());
  for (const auto& item : all) EXPECT_TRUE(at::allclose(state[item.key()], item.value(), 1e-4, 1e-6)) << item.key();
}

TEST_P(PipelineOn, TrainsAsOneProcessDoes) {
  on_ranks([&](Context& context) {
    const PipelineOptions& options = GetParam().options;
    const int pipelines = context.world_size() / options.stages;
    torch::manual_seed(context.rank() == 0 ? 7 : 8);  // rank 0's values count
    torch::nn::Sequential layers = small_sequence();
    Pipeline pipeline(layers, context, options);
    layers = nullptr;
    EXPECT_EQ(pipeline.stage(), context.rank() / pipelines);
    ZeroRedundancyOptimizer optimizer(pipeline.replica(), torch::optim::SGDOptions(0.2).momentum(0.9));
    Alone alone(7);
    for (int step = 0; step < kSteps; ++step) {
      const Alone::Step expected = alone.step(step, pipelines);
      const auto [data, target] = small_batch(step, pipeline.shard().rank, kRows);
      optimizer.zero_grad();
      const double loss = pipeline.forward_backward(pipeline.stage() == 0 ? data : at::Tensor(), target, small_loss);
      EXPECT_NEAR(loss, expected.losses[static_cast<size_t>(pipeline.shard().rank)], 1e-5);
      EXPECT_NEAR(pipeline.clip_grad_norm(0.2), expected.norm, 1e-5);
      optimizer.step();
    }
    const StateDict state = pipeline.state_dict();
    EXPECT_EQ(state.is_empty(), context.rank() != 0);
    if (context.rank() == 0) expect_near(state, *alone.layers);
  });
}

TEST_P(PipelineOn, ForwardGivesTheLastLayersOutputOnAllRanks) {
  on_ranks([&](Context& context) {
    torch::manual_seed(3);
    torch::nn::Sequential layers = small_sequence();
    torch::manual_seed(3);
    torch::nn::Sequential taken = small_sequence();
    Pipeline pipeline(taken, context, GetParam().options);
    for (const auto& parameter : taken->parameters())  // nobody reads what is not trained
      EXPECT_TRUE(parameter.numel() > 0 || GetParam().options.stages > 1);
    for (const int64_t rows : {kRows, int64_t{1}, kRows}) {
      const at::Tensor data = small_batch(1, 0, rows).data;
      const at::Tensor output = pipeline.forward(pipeline.stage() == 0 ? data : at::Tensor());
      EXPECT_TRUE(at::allclose(output, layers->forward(data), 1e-5, 1e-6));
      EXPECT_FALSE(output.requires_grad());
    }
  });
}

TEST_P(PipelineOn, LayersThatAreMadeOneByOneHaveTheNumbersOfThoseMadeTogether) {
  on_ranks([&](Context& context) {
    std::vector<Pipeline::MakeLayer> makers;
    for (const int64_t width : {4, 6, 3, 5, 2})
      makers.push_back([width] { return torch::nn::AnyModule(torch::nn::Linear(width, width)); });
    torch::manual_seed(5);
    Pipeline pipeline(makers, context, {.stages = GetParam().options.stages});
    const StateDict state = pipeline.state_dict();
    torch::manual_seed(5);
    torch::nn::Sequential together;
    for (const int64_t width : {4, 6, 3, 5, 2}) together->push_back(torch::nn::Linear(width, width));
    const std::string expected = context.rank() == 0 ? hash(state_dict(*together)) : hash(StateDict());
    EXPECT_EQ(hash(state), expected);
  });
}

TEST_P(PipelineOn, BuffersComeAfterParametersAsInTheSequence) {
  on_ranks([&](Context& context) {
    const auto made = [] {
      torch::manual_seed(4);
      torch::nn::Sequential layers;
      for (int i = 0; i < 4; ++i) {
        layers->push_back(torch::nn::Linear(6, 6));
        layers->push_back(torch::nn::BatchNorm1d(6));
      }
      return layers;
    };
    Pipeline pipeline(made(), context, {.stages = GetParam().options.stages});
    const StateDict state = pipeline.state_dict();
    const auto sequence = made();
    EXPECT_EQ(hash(state), context.rank() == 0 ? hash(state_dict(*sequence)) : hash(StateDict()));
  });
}

TEST_P(PipelineOn, TakesTensorsWithoutElementsAndNormsThatAreNotFinite) {
  on_ranks([&](Context& context) {
    torch::nn::Sequential layers;
    for (int i = 0; i < 4; ++i) layers->push_back(torch::nn::Linear(6, i == 3 ? 2 : 6));
    Pipeline pipeline(layers, context, {.stages = GetParam().options.stages, .micro_batches = 4});
    const at::Tensor empty = at::empty({4, 0, 6});
    EXPECT_EQ(pipeline.forward(empty).sizes(), at::IntArrayRef({4, 0, 2}));
    const at::Tensor data = at::full({4, 6}, std::numeric_limits<float>::infinity());
    (void)pipeline.forward_backward(data, at::ones({4, 2}), torch::nn::MSELoss());
    EXPECT_FALSE(std::isfinite(pipeline.clip_grad_norm(1)));
  });
}

/// Trains to step `end` from the newest checkpoint in the folder, and returns the hash of the weights on rank 0.
std::string trained(Context& context, const std::string& folder, const PipelineOptions& options, int end) {
  torch::manual_seed(9);
  Pipeline pipeline(small_sequence(), context, options);
  torch::optim::AdamW optimizer(pipeline.layers()->parameters(), torch::optim::AdamWOptions(0.05));
  Checkpointer checkpointer(folder, context.group());
  checkpointer.add("model", pipeline).add("optimizer", optimizer, Checkpointer::Scope::kEachRank);
  checkpointer.resume();
  for (auto step = static_cast<int>(checkpointer.resumed_step()); step < end; ++step) {
    const auto [data, target] = small_batch(step, pipeline.shard().rank, kRows);
    optimizer.zero_grad();
    (void)pipeline.forward_backward(data, target, small_loss);
    optimizer.step();
  }
  checkpointer.save(end);
  checkpointer.finish();
  const StateDict state = pipeline.state_dict();
  return context.rank() == 0 ? hash(state) : "";
}

TEST_P(PipelineOn, ResumesFromACheckpointWithTheSameBits) {
  const TemporaryFolder straight, twice;
  on_ranks([&](Context& context) {
    const PipelineOptions& options = GetParam().options;
    const std::string expected = trained(context, straight.path() / "run", options, kSteps);
    (void)trained(context, twice.path() / "run", options, 2);
    EXPECT_EQ(trained(context, twice.path() / "run", options, kSteps), expected);
  });
}

TEST_P(PipelineOn, ItsCheckpointIsThatOfTheSequence) {
  const TemporaryFolder folder;
  on_ranks([&](Context& context) {
    (void)trained(context, folder.path() / "run", GetParam().options, 2);
    torch::manual_seed(1);
    torch::nn::Sequential sequence = small_sequence();
    Checkpointer checkpointer(folder.path() / "run", context.group());
    checkpointer.add("model", *sequence);
    ASSERT_TRUE(checkpointer.resume());
    Pipeline pipeline(small_sequence(), context, GetParam().options);
    pipeline.load_state_dict(state_dict(*sequence));
    const StateDict state = pipeline.state_dict();
    const std::string expected = context.rank() == 0 ? hash(state_dict(*sequence)) : hash(StateDict());
    EXPECT_EQ(hash(state), expected);
    const at::Tensor data = small_batch(0, 0, kRows).data;
    EXPECT_TRUE(at::allclose(pipeline.forward(data), sequence->forward(data), 1e-5, 1e-6));
  });
}

}  // namespace
}  // namespace lockstep::pipeline_test
