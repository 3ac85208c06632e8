// Ranks of which one is in a pass of a pipeline and another waits in another group: all are told who waits where.

#include <lockstep/pipeline.h>

#include <optional>

#include <gtest/gtest.h>
#include <lockstep/checkpointer.h>
#include <lockstep/sync_batch_norm.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/loss.h>
#include <torch/optim/sgd.h>

#include "pipeline/small_sequence.h"
#include "support/deadlock.h"
#include "support/temporary_folder.h"

namespace lockstep::waits_in_pipelines_test {
namespace {

using namespace testing;  // NOLINT

class WaitsInPipelinesOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{3, "shm"}, {2, "gloo"}, {4, "shm"}, {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Engines, WaitsInPipelinesOn, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

/// Of 4 ranks, two pipelines of two stages.
int stages_of(const Context& context) { return context.world_size() == 4 ? 2 : context.world_size(); }

struct Training {
  explicit Training(Context& context) : pipeline(small_sequence(), context, {.stages = stages_of(context)}) {}
  void pass(int step = 0, const Pipeline::Loss& loss = small_loss) {
    const auto [data, target] = small_batch(step, 0, 12);
    (void)pipeline.forward_backward(data, target, loss);
  }
  void train(int step = 0) {
    optimizer.zero_grad();
    pass(step);
    optimizer.step();
  }
  Pipeline pipeline;
  torch::optim::SGD optimizer{pipeline.layers()->parameters(), 0.1};
};

using Part = std::function<void(Training&, Context&)>;

/// After a step of all, one rank does `odd`, and the others train.
void expect_told(const Engine& engine, bool is_first, const Part& odd, const std::string& words) {
  run_ranks(engine, [&](Context& context) {
    Training training(context);
    training.train();
    context.group().barrier();
    const bool is_odd = context.rank() == (is_first ? 0 : context.world_size() - 1);
    const std::string said = told_of_deadlock(
        [&] {
          if (is_odd)
            odd(training, context);
          else
            training.train(1);
        },
        "rank " + std::to_string(context.rank()));
    EXPECT_NE(said.find(words), std::string::npos) << said;
  });
}

TEST_P(WaitsInPipelinesOn, AStateDictOfOneRank) {
  const Part odd = [](Training& training, Context&) { (void)training.pipeline.state_dict(); };
  expect_told(GetParam(), /*is_first=*/true, odd,
              "rank 0 in Pipeline::state_dict() in the group of all ranks; rank 1 ");
  expect_told(GetParam(), /*is_first=*/false, odd, " waiting in Pipeline::forward_backward() for a message from rank ");
}

TEST_P(WaitsInPipelinesOn, AStepThatOneRankLeavesOut) {
  expect_told(
      GetParam(), /*is_first=*/false, [](Training&, Context& context) { (void)context.group().mean(1); },
      " in all_reduce #");
}

TEST_P(WaitsInPipelinesOn, AStateThatOneRankLoads) {
  expect_told(
      GetParam(), /*is_first=*/true,
      [](Training& training, Context&) { training.pipeline.load_state_dict(StateDict()); },
      "rank 0 in Pipeline::load_state_dict() in the group of all ranks; ");
}

TEST_P(WaitsInPipelinesOn, ACheckpointOfOneRank) {
  const TemporaryFolder folder;
  expect_told(
      GetParam(), /*is_first=*/true,
      [&](Training& training, Context& context) {
        Checkpointer checkpointer(folder.path(), context.group());
        checkpointer.add("model", training.pipeline);
        checkpointer.save(1);
      },
      " in the group of all ranks; ");
}

TEST_P(WaitsInPipelinesOn, ACollectiveWithinTheLoss) {
  if (GetParam().world_size == 4) return;  // both ranks of the last stage are in it
  run_ranks(GetParam(), [](Context& context) {
    Training training(context);
    const auto loss = [&](const at::Tensor& scores, const at::Tensor& target) {
      const at::Tensor mean = small_loss(scores, target);
      (void)context.group().mean(mean.item<double>());
      return mean;
    };
    context.group().barrier();
    told_of_deadlock([&] { training.pass(0, loss); }, "rank " + std::to_string(context.rank()));
  });
}

TEST_P(WaitsInPipelinesOn, TwoPipelinesInAnotherOrder) {
  run_ranks(GetParam(), [](Context& context) {
    Training one(context), other(context);
    one.train(), other.train();
    context.group().barrier();
    const bool is_odd = context.rank() == context.world_size() - 1;
    told_of_deadlock([&] { (is_odd ? other : one).train(1); }, "rank " + std::to_string(context.rank()));
  });
}

/// In place of a step, one whole pipeline, or one stage, goes on to what follows.
TEST(WaitsInPipelines, OnePipelineLeavesOutAStep) {
  for (const Engine& engine : {Engine{4, "shm"}, Engine{4, "gloo"}, Engine{4, "hierarchical", "aabb"}})
    run_ranks(engine, [&](Context& context) {
      Training training(context);
      training.train();
      context.group().barrier();
      told_of_deadlock(
          [&] {
            if (context.rank() % 2 == 0) training.train(1);
            context.group().barrier();
          },
          name_of(engine) + ", rank " + std::to_string(context.rank()));
    });
}

TEST_P(WaitsInPipelinesOn, ForwardInPlaceOfAPassOnTheLastRank) {
  run_ranks(GetParam(), [](Context& context) {
    Training training(context);
    training.train();
    context.group().barrier();
    const auto start = Clock::now();
    std::string said = "nothing";
    try {
      if (context.rank() == context.world_size() - 1)
        (void)training.pipeline.forward(small_batch(1, 0, 12).data);
      else
        training.pass(1);
      context.group().barrier();
    } catch (const std::exception& error) {
      said = error.what();
    }
    expect_told_in_time(start, said);
    EXPECT_NE(said, "nothing");
  });
}

TEST_P(WaitsInPipelinesOn, AStepThatOneStageSkips) {
  run_ranks(GetParam(), [](Context& context) {
    Training training(context);
    training.train();
    context.group().barrier();
    told_of_deadlock(
        [&] {
          if (training.pipeline.stage() == 0)
            training.pipeline.replica().skip_step();
          else
            training.pass(1);
          context.group().barrier();
        },
        "rank " + std::to_string(context.rank()));
  });
}

/// Engines tell of a rank that has left.
TEST_P(WaitsInPipelinesOn, ARankThatLeaves) {
  run_ranks(GetParam(), [](Context& context) {
    auto start = Clock::now();
    std::string said = "nothing";
    {
      Training training(context);
      training.train();
      context.group().barrier();
      if (context.rank() == 0) return;
      start = Clock::now();
      try {
        training.train(1);
        training.train(2);
      } catch (const std::exception& error) {
        said = error.what();
      }
    }
    expect_told_in_time(start, said);
    EXPECT_NE(said, "nothing");
  });
}

TEST_P(WaitsInPipelinesOn, BatchNormsOverAllRanks) {
  run_ranks(GetParam(), [](Context& context) {
    torch::nn::Sequential layers;
    for (int i = 0; i < stages_of(context); ++i) {
      layers->push_back(torch::nn::Linear(3, 3));
      layers->push_back(torch::nn::BatchNorm1d(3));
    }
    convert_sync_batchnorm(*layers, context.group());
    Pipeline pipeline(layers, context, {.stages = stages_of(context)});
    context.group().barrier();
    told_of_deadlock(
        [&] {
          (void)pipeline.forward_backward(at::ones({12, 3}), at::ones({12, 3}), torch::nn::MSELoss());
        },
        "rank " + std::to_string(context.rank()));
  });
}

TEST_P(WaitsInPipelinesOn, AStoppedRankIsWaitedFor) {
  run_ranks(GetParam(), [](Context& context) {
    Training training(context);
    std::optional<StoppedNowAndThen> stopped;
    const int last = context.world_size() - 1;
    if (context.rank() == last) stopped.emplace(2, std::chrono::milliseconds(300), std::chrono::milliseconds(3000));
    const auto start = Clock::now();
    for (bool goes_on = true; goes_on;
         goes_on = context.group().broadcast_bytes(seconds_since(start) < 7 ? "1" : "0", last) == "1")
      for (int i = 0; i < 10; ++i) training.train(i);
    (void)training.pipeline.state_dict();
  });
}

}  // namespace
}  // namespace lockstep::waits_in_pipelines_test
