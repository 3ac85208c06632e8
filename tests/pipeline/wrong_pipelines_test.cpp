// Programs that use a pipeline in a wrong way: each rank is told.

#include <lockstep/pipeline.h>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <torch/nn/modules/loss.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include "pipeline/small_sequence.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::wrong_pipelines_test {
namespace {

using namespace testing;  // NOLINT

class WrongPipelineOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, WrongPipelineOn, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

/// `body` throws words on every rank, within 5 s.
void refused(const Engine& engine, const std::function<void(Context&)>& body, const std::string& words) {
  run_ranks(engine, [&](Context& context) {
    const auto begun = std::chrono::steady_clock::now();
    std::string said = "nothing";
    try {
      body(context);
    } catch (const std::exception& error) {
      said = error.what();
    }
    EXPECT_NE(said.find(words), std::string::npos) << "it says: " << said;
    EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::seconds(5));
  });
}

TEST_P(WrongPipelineOn, OptionsThatDiffer) {
  refused(
      GetParam(), [](Context& context) { Pipeline(small_sequence(), context, {.micro_batches = 2 + context.rank()}); },
      "micro_batches: 2");
}

TEST_P(WrongPipelineOn, ACheckpointerOverOtherRanks) {
  const TemporaryFolder folder;
  refused(
      GetParam(),
      [&](Context& context) {
        Pipeline pipeline(small_sequence(), context.group().split(context.rank()));
        Checkpointer checkpointer(folder.path(), context.group());
        checkpointer.add("model", pipeline);
        checkpointer.save(1);
      },
      "make it with the group that the model was made with");
}

TEST_P(WrongPipelineOn, LayersThatDiffer) {
  refused(
      GetParam(),
      [](Context& context) {
        torch::nn::Sequential layers = small_sequence();
        if (context.rank() == 1) layers->push_back(torch::nn::Linear(7, 7));
        Pipeline(layers, context);
      },
      "layers: 6");
  refused(
      GetParam(),
      [](Context& context) {
        const int64_t width = context.rank() == 1 ? 5 : 4;
        Pipeline(torch::nn::Sequential(torch::nn::Linear(width, 4), torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)),
                 context);
      },
      "the ranks do not hold the same model: layer 0 is `0: torch::nn::Linear(");
}

TEST_P(WrongPipelineOn, CutsThatMakeNoStages) {
  refused(
      GetParam(), [](Context& context) { Pipeline(small_sequence(), context, {.in_flight = -1}); },
      "in_flight = -1; give the number of micro-batches in flight");
  refused(
      GetParam(), [](Context& context) { Pipeline(small_sequence(), context, {.stages = 5}); },
      "5 stages; their number must divide that of the ranks");
  refused(
      GetParam(), [](Context& context) { Pipeline(small_sequence(), context, {.micro_batches = -1}); },
      "-1 micro_batches; give at least 1");
  refused(
      GetParam(), [](Context& context) { Pipeline(torch::nn::Sequential(torch::nn::Linear(2, 2)), context); },
      "1 layers cannot be cut into");
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline(small_sequence(), context,
                 {.cuts = std::vector<size_t>(static_cast<size_t>(context.world_size()) - 1, 6)});
      },
      "the cuts must be ascending numbers of layers from 1 to 5");
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline(small_sequence(), context, {.cuts = {1, 2, 3, 4}});
      },
      "4 cuts make 5 stages, not");
  refused(
      GetParam(),
      [](Context& context) {
        torch::nn::Sequential layers{torch::nn::GELU()};
        for (int i = 1; i < context.world_size(); ++i) layers->push_back(torch::nn::Linear(2, 2));
        Pipeline(layers, context);
      },
      "stage 0 has no parameter to train");
}

TEST_P(WrongPipelineOn, ATensorOfTwoStages) {
  refused(
      GetParam(),
      [](Context& context) {
        const torch::nn::Linear tied(4, 4);
        torch::nn::Sequential layers{tied};
        for (int i = 2; i < context.world_size(); ++i) layers->push_back(torch::nn::Linear(4, 4));
        layers->push_back(tied);
        Pipeline(layers, context);
      },
      "lie in the same memory, and would be trained separately");
}

TEST_P(WrongPipelineOn, AFunctionThatMakesNoLayerOnOneRank) {
  refused(
      GetParam(),
      [](Context& context) {
        std::vector<Pipeline::MakeLayer> makers;
        for (int i = 0; i < 4; ++i)
          makers.push_back([&context, i] {
            return i == 2 && context.rank() == 1 ? torch::nn::AnyModule()
                                                 : torch::nn::AnyModule(torch::nn::Linear(2, 2));
          });
        Pipeline(makers, context);
      },
      "rank 1: Pipeline: the function of layer 2 returned no layer");
}

TEST_P(WrongPipelineOn, BatchesThatDiffer) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, /*pipeline=*/context.rank(), 12);
        (void)pipeline.forward_backward(data, target, small_loss);
      },
      "the targets differ from those of the first stage");
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, context.rank() == 1 ? 12 : 13);
        (void)pipeline.forward_backward(data, target, small_loss);
      },
      "the targets differ from those of the first stage");
}

TEST_P(WrongPipelineOn, BatchesThatAreTooSmall) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context, {.micro_batches = 8});
        const auto [data, target] = small_batch(0, 0, 7);
        (void)pipeline.forward_backward(data, target, small_loss);
      },
      "a batch of 7 samples cannot be cut into 8 micro-batches");
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, context.rank() == context.world_size() - 1 ? 1 : 12);
        (void)pipeline.forward_backward(data, target, small_loss);
      },
      "a batch of 1 samples cannot be cut into");
}

TEST_P(WrongPipelineOn, WhatIsMissing) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        (void)pipeline.forward_backward({}, small_batch(0, 0, 12).target, small_loss);
      },
      "the first stage needs an input");
  refused(
      GetParam(), [](Context& context) { (void)Pipeline(small_sequence(), context).forward({}); },
      "the first stage needs an input");
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, 12);
        (void)pipeline.forward_backward(data, context.rank() == 1 ? at::Tensor() : target, small_loss);
      },
      "needs the targets on every stage");
}

TEST_P(WrongPipelineOn, ALossThatThrows) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, 12);
        int calls = 0;
        const auto loss = [&calls](const at::Tensor& scores, const at::Tensor& goal) {
          if (++calls == 3) throw std::runtime_error("this sample is broken");
          return small_loss(scores, goal);
        };
        EXPECT_ANY_THROW((void)pipeline.forward_backward(data, target, loss));
        EXPECT_NO_THROW(context.group().barrier());
        (void)pipeline.forward_backward(data, target, loss);
      },
      "an earlier pass failed");
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, 12);
        (void)pipeline.forward_backward(data, target,
                                        [](const at::Tensor& scores, const at::Tensor&) { return scores; });
      },
      "the loss must be a tensor with one element");
}

TEST_P(WrongPipelineOn, ALayerThatThrows) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(
            torch::nn::Sequential(torch::nn::Linear(3, 3), torch::nn::Linear(5, 3), torch::nn::Linear(3, 3)), context);
        (void)pipeline.forward_backward(at::ones({12, 3}), at::ones({12, 3}), torch::nn::MSELoss());
      },
      "mat1 and mat2 shapes cannot be multiplied");
}

TEST_P(WrongPipelineOn, ClippingByOtherNorms) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, 12);
        (void)pipeline.forward_backward(data, target, small_loss);
        (void)pipeline.clip_grad_norm(1 + context.rank());
      },
      "clip_grad_norm() was given different arguments on other stages");
}

TEST_P(WrongPipelineOn, LayersOfOtherKindsOrOptions) {
  refused(
      GetParam(),
      [](Context& context) {
        torch::nn::Sequential layers = small_sequence();
        if (context.rank() == 1)
          layers->push_back(torch::nn::Tanh());
        else
          layers->push_back(torch::nn::ReLU());
        Pipeline(layers, context);
      },
      "torch::nn::Tanh");
  refused(
      GetParam(),
      [](Context& context) {
        torch::nn::Sequential layers = small_sequence();
        layers->push_back(torch::nn::LeakyReLU(torch::nn::LeakyReLUOptions().negative_slope(0.1 + context.rank())));
        Pipeline(layers, context);
      },
      "negative_slope=0.1");
}

TEST_P(WrongPipelineOn, InputsThatDiffer) {
  for (const bool trains : {true, false})
    refused(
        GetParam(),
        [&](Context& context) {
          Pipeline pipeline(small_sequence(), context);
          const at::Tensor data = small_batch(0, context.rank(), 12).data, target = small_batch(0, 0, 12).target;
          if (trains)
            (void)pipeline.forward_backward(data, target, small_loss);
          else
            (void)pipeline.forward(data);
        },
        "the input differs from that of the first stage");
}

TEST_P(WrongPipelineOn, TargetsOfAnotherShape) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        const auto [data, target] = small_batch(0, 0, 12);
        const bool flat = context.rank() == 1;
        (void)pipeline.forward_backward(data, flat ? target.reshape({12, 5, 1}) : target, small_loss);
      },
      "the targets differ from those of the first stage");
}

TEST_P(WrongPipelineOn, ALayerThatLosesItsSamples) {
  refused(
      GetParam(),
      [](Context& context) {
        struct Mean : torch::nn::Module {
          Mean() { register_parameter("one", at::ones({1})); }
          at::Tensor forward(const at::Tensor& x) { return x.mean(0, true) * named_parameters()["one"]; }
        };
        torch::nn::Sequential layers;
        for (int i = 0; i < context.world_size(); ++i) layers->push_back(std::make_shared<Mean>());
        Pipeline pipeline(layers, context);
        (void)pipeline.forward_backward(at::ones({12, 3}), at::ones({12, 3}), torch::nn::MSELoss());
      },
      "the first dimension of the tensor for the next stage must be the samples");
}

TEST_P(WrongPipelineOn, ABackwardThatThrows) {
  for (const int stage : {0, 1})
    refused(
        GetParam(),
        [&](Context& context) {
          struct Throws : torch::nn::Module {
            Throws() { register_parameter("one", at::ones({1})); }
            at::Tensor forward(const at::Tensor& x) {
              const at::Tensor y = x * named_parameters()["one"];
              if (throws) y.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("my hook"); });
              return y;
            }
            bool throws = false;
          };
          torch::nn::Sequential layers;
          for (int i = 0; i < context.world_size(); ++i) {
            const auto layer = std::make_shared<Throws>();
            layer->throws = i == stage;
            layers->push_back(layer);
          }
          Pipeline pipeline(layers, context, {.micro_batches = 2});
          (void)pipeline.forward_backward(at::ones({12, 3}), at::ones({12, 3}), torch::nn::MSELoss());
        },
        "my hook");
}

TEST_P(WrongPipelineOn, OneStageThatEvaluates) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        if (context.rank() == 1) pipeline.layers()->eval();
        const auto [data, target] = small_batch(0, 0, 12);
        (void)pipeline.forward_backward(data, target, small_loss);
      },
      "; call pipeline.layers()->train() or eval() on every rank");
}

TEST_P(WrongPipelineOn, StatesThatDiffer) {
  refused(
      GetParam(),
      [](Context& context) {
        torch::manual_seed(context.rank());
        const auto other = small_sequence();
        Pipeline pipeline(small_sequence(), context);
        pipeline.load_state_dict(state_dict(*other));
      },
      "load_state_dict() was given another state on");
}

/// A pipeline that is trained, with an optimizer of LibTorch.
struct Training {
  explicit Training(Context& context) : pipeline(small_sequence(), context) {}
  void pass(int step) {
    const auto [data, target] = small_batch(step, 0, 12);
    (void)pipeline.forward_backward(data, target, small_loss);
  }
  Pipeline pipeline;
  torch::optim::SGD optimizer{pipeline.layers()->parameters(), 0.1};
};

TEST_P(WrongPipelineOn, AStepThatOneRankLeavesOut) {
  for (const int odd : {0, 1}) {
    refused(
        GetParam(),
        [&](Context& context) {
          Training training(context);
          for (int step = 0; step < 3; ++step) {
            training.optimizer.zero_grad();
            training.pass(step);
            if (step != 1 || context.rank() != odd) training.optimizer.step();
          }
        },
        "; call optimizer.step() on every rank, or on none");
    refused(
        GetParam(),
        [&](Context& context) {
          Training training(context);
          training.pass(0);
          if (context.rank() != odd) training.optimizer.step();
          (void)training.pipeline.forward(small_batch(0, 0, 12).data);
        },
        "; call optimizer.step() on every rank, or on none");
    refused(
        GetParam(),
        [&](Context& context) {
          Training training(context);
          training.pass(0);
          if (context.rank() != odd) training.optimizer.step();
          (void)training.pipeline.state_dict();
        },
        "did not step, and kept gradients");
  }
}

TEST_P(WrongPipelineOn, GradientsThatOneRankDoesNotClear) {
  for (const bool to_none : {true, false})
    refused(
        GetParam(),
        [&](Context& context) {
          Training training(context);
          for (int step = 0; step < 3; ++step) {
            if (context.rank() != 1) training.optimizer.zero_grad(to_none);
            training.pass(step);
            training.optimizer.step();
          }
        },
        "; call optimizer.zero_grad() on every rank, or on none");
}

TEST_P(WrongPipelineOn, GradientsThatEachStageClipsForItself) {
  for (const bool by_replica : {false, true})
    for (const bool to_none : {true, false}) {
      if (!by_replica && !to_none) continue;  // LibTorch's clip counts no version, and zeros tell nothing
      refused(
          GetParam(),
          [&](Context& context) {
            Training training(context);
            for (int step = 0; step < 3; ++step) {
              training.optimizer.zero_grad(to_none);
              training.pass(step);
              if (by_replica)
                (void)training.pipeline.replica().clip_grad_norm(0.01);
              else
                (void)torch::nn::utils::clip_grad_norm_(training.pipeline.layers()->parameters(), 0.01);
              training.optimizer.step();
            }
          },
          "as LibTorch's clip_grad_norm_ does, which sees one stage's gradients alone");
    }
}

TEST_P(WrongPipelineOn, WhatIsNotWrong) {
  run_ranks(GetParam(), [](Context& context) {
    Training training(context);
    training.pass(0);
    training.pass(1);  // adds up
    training.optimizer.step();
    training.optimizer.zero_grad(false);
    (void)training.pipeline.forward(small_batch(0, 0, 12).data);
    training.pass(2);
    (void)training.pipeline.clip_grad_norm(0.01);
    training.optimizer.step();
    training.optimizer.zero_grad();
    training.pass(3);
    (void)training.pipeline.clip_grad_norm(1e9);  // changes nothing
    (void)training.pipeline.state_dict();
    training.pass(4);
    // Gradients that no step has used, as of a stage that was run by hand.
    for (const at::Tensor& parameter : training.pipeline.layers()->parameters()) parameter.mutable_grad().add_(1);
    training.optimizer.zero_grad();
    training.pass(5);
  });
}

TEST_P(WrongPipelineOn, AStageThatIsSavedAsTheModel) {
  const TemporaryFolder folder;
  refused(
      GetParam(),
      [&](Context& context) {
        Training training(context);
        Checkpointer checkpointer(folder.path() / std::to_string(context.world_size()), context.group());
        checkpointer.add("model", training.pipeline.replica());
        checkpointer.save(1);
      },
      "`model` is replicated over ");
}

TEST_P(WrongPipelineOn, StatesOfOtherLayers) {
  refused(
      GetParam(),
      [](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        pipeline.load_state_dict(StateDict());
      },
      "0.weight is missing");
}

TEST_P(WrongPipelineOn, AnOptimizerThatIsSavedAsIfItWereTheSameEverywhere) {
  const TemporaryFolder folder;
  refused(
      GetParam(),
      [&](Context& context) {
        Pipeline pipeline(small_sequence(), context);
        torch::optim::AdamW optimizer(pipeline.layers()->parameters(), torch::optim::AdamWOptions(0.05));
        Checkpointer checkpointer(folder.path() / std::to_string(context.world_size()), context.group());
        checkpointer.add("model", pipeline).add("optimizer", optimizer);
        const auto [data, target] = small_batch(0, 0, 12);
        (void)pipeline.forward_backward(data, target, small_loss);
        optimizer.step();
        checkpointer.save(1);
      },
      "optimizer");
}

}  // namespace
}  // namespace lockstep::wrong_pipelines_test
