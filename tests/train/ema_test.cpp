#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <torch/nn.h>
#include <torch/optim.h>

#include <lockstep/checkpointer.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>

#include "checkpoint/failure.h"
#include "data_parallel/models.h"
#include "support/complaint.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Averages against timm's formula and PyTorch's; tests/golden/write_training_golden.py has the other side.

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

struct WeightsImpl : torch::nn::Module {
  WeightsImpl() { set(0); }
  void set(int step) {
    at::NoGradGuard no_grad;
    weight.copy_(formula({3, 4}, step));
    running.copy_(formula({5}, step + 0.5));
    count.fill_(step);
  }
  at::Tensor weight{register_parameter("weight", at::zeros({3, 4}))};
  at::Tensor running{register_buffer("running", at::zeros({5}))};
  at::Tensor count{register_buffer("count", at::zeros({}, at::kLong))};
};
TORCH_MODULE(Weights);

constexpr int kSteps = 60;

StateDict golden(const std::string& name) {
  return without_prefix("ema/" + name + "/",
                        lockstep::load(LOCKSTEP_SOURCE_DIR "/tests/golden/training.safetensors").tensors);
}

void train(Weights& model, Ema& ema) {
  for (int step = 1; step <= kSteps; ++step) {
    model->set(step);
    ema.update();
  }
}

TEST(EmaTest, WarmsUpByTimmsFormulaSeveralDecaysAtOnce) {
  Weights model, odd_model;
  Ema ema(*model, {.decays = {0.9, 0.97}, .warm_up = true});
  train(model, ema);
  Ema odd(*odd_model, {.decays = {0.9},
                       .warm_up = true,
                       .warmup_gamma = 7,
                       .warmup_power = 0.8,
                       .min_decay = 0.2,
                       .update_after_step = 3});
  train(odd_model, odd);
  for (const auto& [name, state] : {std::pair("fast", ema.averaged_state(0)), std::pair("slow", ema.averaged_state(1)),
                                    std::pair("odd", odd.averaged_state())}) {
    const StateDict expected = golden(name);
    for (const char* key : {"weight", "running"})
      EXPECT_TRUE(at::allclose(state[key].to(at::kDouble), expected[key], 0, 1e-6)) << name << ' ' << key;
    EXPECT_EQ(state["count"].item<int64_t>(), kSteps);
  }
  EXPECT_FALSE(at::allclose(ema.averaged_state(0)["weight"], ema.averaged_state(1)["weight"], 0, 1e-3));
}

TEST(EmaTest, IsPyTorchsAveragedModelWithoutWarmUpAndWithTheLiveBuffers) {
  Weights model;
  Ema ema(*model, {.decays = {0.95}, .average_buffers = false});
  train(model, ema);
  const StateDict state = ema.averaged_state(), expected = golden("torch");
  ASSERT_EQ(expected.size(), 3u);
  for (const auto& item : state) EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 0, 1e-6)) << item.key();
}

TEST(EmaTest, AveragesOfSixteenBitsAreKeptInThirtyTwo) {
  torch::nn::Linear net(2, 2);
  net->to(at::kBFloat16);
  {
    at::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(1);
    Ema ema(*net, {.decays = {0.999}});
    for (auto& parameter : net->parameters()) parameter.fill_(2);
    for (int i = 0; i < 100; ++i) ema.update();
    const StateDict state = ema.averaged_state();
    EXPECT_EQ(state["weight"].scalar_type(), at::kBFloat16);
    // 2 - 0.999^100; in bfloat16 it would still be 1.
    EXPECT_NEAR(state["weight"][0][0].item<double>(), 1.0952, 0.004);
  }
}

TEST(EmaTest, TheGuardSwapsInPlaceAndBack) {
  auto net = make_model("batch_norm");
  Ema ema(*net, {.decays = {0.5}});
  {
    at::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.mul_(1.7);
  }
  ema.update();
  const auto snapshot = [&] {
    StateDict copy;
    for (const auto& item : state_dict(*net)) copy.insert(item.key(), item.value().detach().clone());
    return copy;
  };
  const StateDict own = snapshot(), averaged = ema.averaged_state();
  const at::Tensor weight = net->parameters()[0];
  const void* memory = weight.data_ptr();
  {
    const auto guard = ema.averaged_weights();
    EXPECT_EQ(hash(state_dict(*net)), hash(averaged));
    EXPECT_NE(hash(state_dict(*net)), hash(own));
    EXPECT_TRUE(net->parameters()[0].is_same(weight));
    EXPECT_EQ(weight.data_ptr(), memory);
    EXPECT_THROW(ema.update(), c10::Error);
    EXPECT_THROW(ema.state_dict(), c10::Error);
    EXPECT_THROW((void)ema.averaged_weights(), c10::Error);
  }
  EXPECT_EQ(hash(state_dict(*net)), hash(own));
  EXPECT_EQ(hash(ema.averaged_state()), hash(averaged));
  EXPECT_THROW((void)ema.averaged_weights(1), c10::Error);
}

struct TiedImpl : torch::nn::Module {
  torch::nn::Linear a{register_module("a", torch::nn::Linear(2, 2))};
  at::Tensor b{register_parameter("b", a->weight)};
};
TORCH_MODULE(Tied);

TEST(EmaTest, TiedWeightsAreOne) {
  Tied net;
  Ema ema(*net, {.decays = {0.5}});
  const at::Tensor before = net->b.detach().clone();
  {
    at::NoGradGuard no_grad;
    net->b.add_(1);
  }
  ema.update();
  {
    const auto guard = ema.averaged_weights();
    EXPECT_TRUE(at::allclose(net->a->weight, before + 0.5, 1e-5, 1e-6));
  }
  EXPECT_TRUE(at::allclose(net->a->weight, before + 1, 1e-5, 1e-6));
  const StateDict state = ema.averaged_state();
  EXPECT_TRUE(state["b"].is_alias_of(state["a.weight"]));
}

TEST(EmaTest, TheFileOfAnAverageLoadsIntoTheModelStrictly) {
  TemporaryFolder folder;
  auto net = make_model("batch_norm"), other = make_model("batch_norm");
  Ema ema(*net, {.decays = {0.5}});
  {
    at::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.add_(1);
  }
  ema.update();
  for (const char* name : {"ema.pt", "ema.safetensors"}) {
    lockstep::save(ema.averaged_state(), (folder.path() / name).string());
    load_state_dict(*other, lockstep::load((folder.path() / name).string()).tensors);
    EXPECT_EQ(hash(state_dict(*other)), hash(ema.averaged_state()));
  }
}

TEST(EmaTest, AStateOfAnotherModelIsRefusedWhole) {
  auto net = make_model("plain"), other = make_model("batch_norm");
  Ema ema(*net), larger(*other), several(*net, {.decays = {0.9, 0.99}});
  const std::string before = hash(ema.averaged_state());
  const std::string text = failure([&] { ema.load_state_dict(larger.state_dict()); });
  EXPECT_NE(text.find("unknown: bn.weight (decay 0.9999)"), std::string::npos) << text;
  EXPECT_NE(failure([&] { larger.load_state_dict(ema.state_dict()); }).find("missing: bn.running_mean"),
            std::string::npos);
  EXPECT_NE(failure([&] { ema.load_state_dict(several.state_dict()); }).find("decays"), std::string::npos);
  EXPECT_EQ(hash(ema.averaged_state()), before);
  EXPECT_THROW(Ema(*net, {.decays = {1.5}}), c10::Error);
  EXPECT_THROW(Ema(*net, {.decays = {}}), c10::Error);
}

/// Steps `first` to `last` of a training with averages; their hashes.
std::string train_with_ema(Context& context, const std::string& folder, bool resume, int last) {
  auto model = make_model("batch_norm");
  DistributedDataParallel replica(model, context);
  auto optimizer = make_sgd(*model);
  Ema ema(*model, {.decays = {0.9, 0.99}, .warm_up = true});
  int64_t step = 0;
  Checkpointer checkpointer(folder, context.group(), {.every_steps = 7});
  checkpointer.add("model", *model).add("optimizer", optimizer).add("ema", ema).add("step_count", step);
  EXPECT_EQ(checkpointer.resume(), resume);
  while (step < last) {
    optimizer.zero_grad();
    loss_of(*model, batch(static_cast<int>(step), context.rank()), 0, 0).backward();
    optimizer.step();
    ema.update();
    checkpointer.step(++step);
  }
  checkpointer.finish();
  EXPECT_EQ(ema.updates(), last);
  const std::string own = hash(ema.averaged_state(0)) + hash(ema.averaged_state(1));
  const auto all = context.group().all_gather_bytes(own);
  for (const std::string& other : all) EXPECT_EQ(other, own);
  return own;
}

TEST(EmaTest, IsTheSameOnAllRanksAndGoesOnFromACheckpoint) {
  TemporaryFolder folder;
  for (const int ranks : {2, 3}) {
    const std::string base = (folder.path() / std::to_string(ranks)).string();
    run_ranks(ranks, [&](Context& context) { train_with_ema(context, base + "split", false, 7); });
    run_ranks(ranks, [&](Context& context) {
      EXPECT_EQ(train_with_ema(context, base + "split", true, 12),
                train_with_ema(context, base + "straight", false, 12));
    });
  }
}

// With weights drawn from `seed + rank`, averages that were made before DistributedDataParallel started from each
// rank's own, and stayed apart for good. They must be those of averages that were made after it.
TEST(EmaTest, MadeBeforeDistributedDataParallelItIsTheSameOnAllRanks) {
  for (const int ranks : {2, 3}) {
    const auto body = [](Context& context) {
      auto model = make_model("batch_norm"), other = make_model("batch_norm");
      for (auto& parameter : model->parameters()) parameter.data().copy_(at::randn(parameter.sizes()));
      for (auto& buffer : model->buffers()) buffer.data().fill_(context.rank());
      Ema early(*model, {.decays = {0.9, 0.99}}), untouched(*other);
      const auto drawn = context.group().all_gather_bytes(hash(early.averaged_state()));
      EXPECT_NE(drawn[0], drawn[1]) << "so this test cannot fail";
      const std::string before = hash(untouched.averaged_state());
      for (auto& parameter : other->parameters()) parameter.data().fill_(context.rank());
      DistributedDataParallel replica(model, context);
      Ema late(*model, {.decays = {0.9, 0.99}});
      auto optimizer = make_sgd(*model);
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        loss_of(*model, batch(step, context.rank()), 0, 0).backward();
        optimizer.step();
        early.update();
        late.update();
      }
      for (const size_t which : {0, 1}) {
        const std::string own = hash(early.averaged_state(which));
        EXPECT_EQ(own, hash(late.averaged_state(which)));
        for (const std::string& rank : context.group().all_gather_bytes(own)) EXPECT_EQ(rank, own);
      }
      replica.broadcast_parameters(1);  // an average that has begun follows no more
      EXPECT_EQ(hash(early.averaged_state(0)), hash(late.averaged_state(0)));
      EXPECT_EQ(hash(untouched.averaged_state()), before) << "another model's averages are left alone";
    };
    run_ranks(ranks, body, std::chrono::seconds(60), {.seed = 7, .announce = false});
  }
}

TEST(EmaTest, OptionsThatMakeNoAverageAreRefused) {
  Weights model;
  for (const double wrong : {2.0, 1.0, -3.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(Ema(*model, {.warm_up = true, .min_decay = wrong}), c10::Error) << wrong;
    EXPECT_THROW(Ema(*model, {.decays = {wrong}}), c10::Error) << wrong;
  }
  for (const double wrong : {0.0, -1.0, std::nan(""), std::numeric_limits<double>::infinity()}) {
    EXPECT_THROW(Ema(*model, {.warmup_gamma = wrong}), c10::Error) << wrong;
    EXPECT_THROW(Ema(*model, {.warmup_power = wrong}), c10::Error) << wrong;
  }
}

/// It averaged a part, and saved what the model could not load.
TEST(EmaTest, LayersThatCameOrWentSinceItWasMadeAreNamed) {
  using Change = std::function<void(torch::nn::Sequential&)>;
  const auto text_of = [](const Change& change, const std::function<void(Ema&)>& use, int updates) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 1));
    Ema ema(*model);
    for (int i = 0; i < updates; ++i) ema.update();
    change(model);
    return testing::complaint([&] { use(ema); });
  };
  const Change add = [](auto& model) { model->push_back(torch::nn::Linear(1, 1)); };
  const Change replace = [](auto& model) { model->replace_module("1", torch::nn::Linear(2, 1).ptr()); };
  const Change remove = [](auto& model) { model->unregister_module("1"); };
  const std::vector<std::function<void(Ema&)>> uses = {
      [](Ema& ema) { (void)ema.averaged_state(); }, [](Ema& ema) { (void)ema.averaged_weights(); },
      [](Ema& ema) { (void)ema.state_dict(); }, [](Ema& ema) { ema.load_state_dict({}); }};
  for (const int updates : {0, 3})
    for (const auto& use : uses) {
      EXPECT_NE(text_of(add, use, updates).find("`2.weight` has changed since the Ema was made"), std::string::npos);
      EXPECT_NE(text_of(replace, use, updates).find("`1.weight` has changed since"), std::string::npos);
      EXPECT_NE(text_of(remove, use, updates).find("no longer has `1.bias`"), std::string::npos);
    }
  const auto update = [](Ema& ema) { ema.update(); };
  EXPECT_NE(text_of(add, update, 0).find("make a new Ema"), std::string::npos) << "the first update sees it";
  const Change moved = [](auto& model) { model->template parameters()[0].set_data(at::ones({2, 2})); };
  EXPECT_EQ(text_of(moved, update, 0), "") << "the tensors are the same, wherever they lie";
}

}  // namespace
}  // namespace lockstep
