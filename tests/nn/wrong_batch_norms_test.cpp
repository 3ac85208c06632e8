#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include <lockstep/distributed_data_parallel.h>
#include <lockstep/sync_batch_norm.h>

#include "base/clock.h"
#include "data_parallel/models.h"
#include "support/ranks.h"

// Ranks that do not run the same synchronised batch norms: an error on every rank, within seconds, that names the layer
// and the way out. Statistics of different layers are never mixed.

namespace lockstep::wrong_batch_norms_test {
namespace {

using namespace testing;  // NOLINT

struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) { return bn2(fc(torch::relu(bn1(x)))); }
  torch::nn::BatchNorm1d bn1{register_module("bn1", torch::nn::BatchNorm1d(6))};
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(6, 3))};
  torch::nn::BatchNorm1d bn2{register_module("bn2", torch::nn::BatchNorm1d(3))};
};

/// A model in training, of which rank 1 does something else.
struct Training {
  explicit Training(Context& of) : context(of) {
    fill(*net);
    convert_sync_batchnorm(*net, context.group());
    model.emplace(net, context);
  }
  bool is_wrong() const { return context.rank() == 1; }
  at::Tensor loss(int step = 0) { return (*model)(batch(step, context.rank()).data).square().sum(); }
  double mean(const at::Tensor& loss) const { return context.group().mean(loss.item<double>()); }

  Context& context;
  std::shared_ptr<Net> net = std::make_shared<Net>();
  std::optional<DistributedDataParallel<std::shared_ptr<Net>>> model;
};

struct Case {
  std::string name;
  std::function<void(Training&)> steps;
  std::vector<std::string> parts;  ///< of the error on every rank
};

const char* const kBn1 =
    "batch norm `bn1` is synchronised over all ranks, so every rank must run it: call forward on every rank (an empty "
    "batch will do), put the layer into eval(), or do not convert it. ";

const std::vector<Case> kCases{
    {"skips_a_forward",
     [](Training& training) {
       training.loss().backward();
       const at::Tensor loss = training.is_wrong() ? at::zeros({}) : training.loss();
       training.mean(loss);
     },
     {kBn1, "The ranks wait for each other: ", " in the forward of batch norm `bn1` of 6 channels", "rank 1 in "}},
    {"is_in_eval",
     [](Training& training) {
       training.net->train(!training.is_wrong());
       training.loss().backward();
     },
     {kBn1, " in the forward of batch norm `bn1` of 6 channels", "rank 1 in all_reduce #"}},
    {"decides_by_its_own_loss_and_goes_on",
     [](Training& training) {
       for (int step = 0; step < 2; ++step) {
         const at::Tensor loss = training.loss(step);
         if (!training.is_wrong()) loss.backward();
       }
     },
     {"is synchronised over all ranks, so every rank must run it", "the backward of batch norm `bn2` of 3 channels",
      "rank 1 in the forward of batch norm `bn1` of 6 channels"}},
    {"decides_by_its_own_loss_and_waits",
     [](Training& training) {
       const at::Tensor loss = training.loss();
       if (!training.is_wrong()) loss.backward();
       training.mean(loss.detach());
     },
     {"batch norm `bn2` is synchronised over all ranks",
      "The ranks wait for each other: ", " in the backward of batch norm `bn2` of 3 channels", "rank 1 in "}},
    {"has_other_channels",
     [](Training& training) {
       const int64_t channels = training.is_wrong() ? 7 : 5;
       SyncBatchNorm layer(torch::nn::BatchNormOptions(channels), training.context.group());
       layer->forward(at::ones({4, channels}));
     },
     {" is synchronised over all ranks, so every rank must run it", "the forward of a SyncBatchNorm of 5 channels",
      "rank 1 in the forward of a SyncBatchNorm of 7 channels"}},
    {"has_another_eps",
     [](Training& training) {
       torch::nn::BatchNormOptions options(5);
       if (training.is_wrong()) options.eps(0.5);
       SyncBatchNorm layer(options, training.context.group());
       layer->forward(at::rand({4, 5}));
     },
     {" is synchronised over all ranks, so every rank must run it", "Its options differ: ",
      "with eps 1e-05 and momentum 0.1", "rank 1 in the forward of a SyncBatchNorm of 5 channels with eps 0.5"}},
    {"converts_another_momentum",
     [](Training& training) {
       torch::nn::BatchNormOptions options(5);
       options.momentum(training.is_wrong() ? 0.3 : 0.1);
       torch::nn::Sequential one{torch::nn::BatchNorm1d(options)};
       convert_sync_batchnorm(*one, training.context.group());
       one->forward(at::rand({4, 5}));
     },
     {"batch norm `0` is synchronised", "Its options differ: ", "with eps 1e-05 and momentum 0.3"}},
    {"has_another_order",
     [](Training& training) {
       torch::nn::Sequential pair(torch::nn::BatchNorm1d(6), torch::nn::BatchNorm1d(6));
       convert_sync_batchnorm(*pair, training.context.group());
       for (const size_t index : {0, 1})
         pair[training.is_wrong() ? 1 - index : index]->as<torch::nn::BatchNorm1d>()->forward(at::rand({4, 6}));
     },
     {" is synchronised over all ranks, so every rank must run it", " in the forward of batch norm `0` of 6 channels",
      "rank 1 in the forward of batch norm `1` of 6 channels"}},
    {"has_another_order_of_equal_names",
     [](Training& training) {
       torch::nn::Sequential first(torch::nn::BatchNorm1d(6)), second(torch::nn::BatchNorm1d(6));
       for (auto each : {first, second}) convert_sync_batchnorm(*each, training.context.group());
       const at::Tensor x = at::rand({4, 6});
       training.is_wrong() ? second->forward(x) : first->forward(x);
     },
     {" in the forward of batch norm `0` of 6 channels, layer 1 of 2 with that name",
      "rank 1 in the forward of batch norm `0` of 6 channels, layer 2 of 2 with that name"}},
    {"is_in_eval_while_gradients_have_another_group",
     [](Training& training) {
       torch::nn::Sequential net(torch::nn::BatchNorm1d(6));
       convert_sync_batchnorm(*net, training.context.group().split(0));
       DistributedDataParallel model(net, training.context);
       net->train(!training.is_wrong());
       model(at::rand({4, 6})).sum().backward();
     },
     {"batch norm `0` is synchronised over all ranks", " in the forward of batch norm `0` of 6 channels",
      "rank 1 in all_reduce #"}},
    {"converts_while_others_attach",
     [](Training& training) {
       torch::nn::Sequential one(torch::nn::BatchNorm1d(5));
       if (training.is_wrong())
         convert_sync_batchnorm(*one, training.context.group());
       else
         DistributedDataParallel model(one, training.context);
     },
     {" called all_gather_bytes() of DistributedDataParallel()",
      "rank 1 called all_gather_bytes() of convert_sync_batchnorm()",
      " Where one rank calls DistributedDataParallel() or convert_sync_batchnorm(), every rank must, in the same "
      "order."}},
    {"converts_other_channels",
     [](Training& training) {
       torch::nn::Sequential one(torch::nn::BatchNorm1d(training.is_wrong() ? 7 : 5));
       convert_sync_batchnorm(*one, training.context.group());
     },
     {"batch norm 0 of the module of rank 1 is `0` of 7 channels, and that of rank 0 is `0` of 5 channels"}},
};

class WrongBatchNorms : public ::testing::TestWithParam<Case> {};
INSTANTIATE_TEST_SUITE_P(Rank1, WrongBatchNorms, ::testing::ValuesIn(kCases),
                         [](const auto& instance) { return instance.param.name; });

const std::vector<Engine> kEngines{{2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};

TEST_P(WrongBatchNorms, AreAnErrorOnEveryRankThatNamesTheLayer) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      Training training(context);
      context.group().barrier();
      const auto start = Clock::now();
      std::string text = "no error";
      try {
        GetParam().steps(training);
      } catch (const std::exception& error) {
        text = error.what();
      }
      EXPECT_LT(seconds_since(start), 5) << name_of(engine);
      for (const std::string& part : GetParam().parts)
        EXPECT_NE(text.find(part), std::string::npos) << name_of(engine) << ": " << part << "\nis not in\n" << text;
    });
}

/// Who is late is not lost: nothing ends while any rank may still come.
TEST(SlowBatchNorms, AreWaitedFor) {
  for (const Engine& engine : kEngines)
    run_ranks(engine, [&](Context& context) {
      Training training(context);
      const int last = context.world_size() - 1;
      const auto pair = context.group().split(context.rank() == 0 ? 0 : 1);
      for (int step = 0; step < 2; ++step) {
        if (context.rank() == last) std::this_thread::sleep_for(std::chrono::milliseconds(3500));
        // Where there are three, rank 1 waits for rank 2 in a group of their own while rank 0 waits in the layer.
        if (context.rank() != 0) {
          EXPECT_EQ(pair.mean(1), 1);
        }
        training.loss(step).backward();
      }
    });
}

TEST(WrongBatchNorms, WhatThePeerOfARankThatHasLeftCalledIsNamed) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{3, "gloo"}})
    run_ranks(engine, [](Context& context) {
      SyncBatchNorm norm(torch::nn::BatchNormOptions(16), context.group());
      const at::Tensor x = at::rand({4, 16}), y = norm(x);
      if (context.rank() == 1) return;
      std::string said;
      try {
        norm(y);
      } catch (const Error& error) {
        said = error.what();
      }
      EXPECT_NE(said.find("called operation 2, all_gather(float64, 38 elements) of a SyncBatchNorm of 16 channels; "),
                std::string::npos)
          << said;
    });
}

}  // namespace
}  // namespace lockstep::wrong_batch_norms_test
